-- KEYS req, out   ARGV attempt, owner, index, pos, event, version
even_at_maxmemory(KEYS[1])
local f = redis.call('HMGET', KEYS[1], 'attempt', 'owner', 'state', 'cancel', 'pos', 'deadline')
if f[1] ~= ARGV[1] or f[2] ~= ARGV[2] or f[3] ~= 'running' then return 'lost' end
local why = show(KEYS[1], KEYS[2], f[5], f[6], ARGV[3], ARGV[4], ARGV[5], ARGV[6])
if why then return why end
if f[4] then return 'cancel' end
return 'ok'
