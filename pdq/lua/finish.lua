-- KEYS req, out, stream   ARGV attempt, owner, group, entry, index, pos, event, reason, ttl
local f = redis.call('HMGET', KEYS[1], 'attempt', 'state', 'pos')
if f[1] == ARGV[1] and f[2] == 'done' then return 'ok' end -- the reply to the first call was lost
if not fenced(KEYS[1], ARGV[1], ARGV[2]) then return 'lost' end
if tonumber(ARGV[6]) > tonumber(f[3]) and tonumber(ARGV[5]) ~= tonumber(f[3]) then return 'gap' end
leave(KEYS[3], ARGV[3], ARGV[4])
finish(KEYS[1], KEYS[2], ARGV[7], ARGV[8], ARGV[9])
if tonumber(ARGV[6]) > tonumber(f[3]) then redis.call('HSET', KEYS[1], 'pos', ARGV[6]) end
return 'ok'
