-- KEYS index of one fingerprint   ARGV now (ms), blocks to keep, most to name
-- Takes the least recently used blocks out of the index until it is within its budget; their hashes. Blocks whose score
-- is in the future are pinned. Takes a little more than needed, so that not every put evicts.
local over = redis.call('ZCARD', KEYS[1]) - tonumber(ARGV[2])
if over <= 0 then return {} end
local count = math.min(over + math.floor(ARGV[2] / 64), tonumber(ARGV[3]))
local victims = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, count)
if #victims > 0 then redis.call('ZREM', KEYS[1], unpack(victims)) end
return victims
