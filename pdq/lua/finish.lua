-- KEYS req, out, load, stream   ARGV attempt, owner, index, pos, event, group, entry, reason, ttl
even_at_maxmemory(KEYS[1])
local f = redis.call('HMGET', KEYS[1], 'attempt', 'state', 'pos', 'reason', 'owner')
-- Ended like this, the reply to the first call was lost; ended otherwise, somebody else did it.
if f[1] == ARGV[1] and f[2] == 'done' and f[4] == ARGV[8] then return 'ok' end
if f[1] ~= ARGV[1] or f[5] ~= ARGV[2] or f[2] ~= 'running' then return 'lost' end
local new = tonumber(ARGV[4]) > tonumber(f[3])
if new and tonumber(ARGV[3]) ~= tonumber(f[3]) then return 'gap' end
finish(KEYS[1], KEYS[2], KEYS[3], ARGV[5], ARGV[8], ARGV[9])
if new then redis.call('HSET', KEYS[1], 'pos', ARGV[4]) end
leave(KEYS[4], ARGV[6], ARGV[7])
return 'ok'
