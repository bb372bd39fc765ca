-- KEYS req, out   ARGV attempt, owner, index, pos, event, version
-- The event holds the tokens [index, pos). Sent again after a lost reply it is already there, which is fine.
even_at_maxmemory(KEYS[1])
if not fenced(KEYS[1], ARGV[1], ARGV[2]) then return 'lost' end
local f = redis.call('HMGET', KEYS[1], 'pos', 'cancel', 'deadline')
local pos = tonumber(f[1])
if tonumber(ARGV[4]) > pos then
  if now() > tonumber(f[3]) then return 'expired' end
  if tonumber(ARGV[3]) ~= pos then return 'gap' end
  redis.call('XADD', KEYS[2], '0-' .. ARGV[4], 'e', ARGV[5])
  redis.call('HSET', KEYS[1], 'pos', ARGV[4], 'v', ARGV[6])
end
if f[2] then return 'cancel' end
return 'ok'
