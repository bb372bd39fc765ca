-- KEYS req, decode stream, prefill stream, load   ARGV attempt, owner, group, entry, id, max_requeues
even_at_maxmemory(KEYS[1])
local f = redis.call('HMGET', KEYS[1], 'requeues', 'cost', 'attempt', 'stage')
if f[3] == ARGV[1] and f[4] == 'prefill' then return 'ok' end -- the reply to the first call was lost
if not fenced(KEYS[1], ARGV[1], ARGV[2]) then return 'lost' end
if tonumber(f[1] or '0') >= tonumber(ARGV[6]) then return 'over' end
local entry = redis.call('XADD', KEYS[3], '*', 'id', ARGV[5])
redis.call('HSET', KEYS[1], 'stage', 'prefill', 'state', 'queued', 'entry', entry, 'owner', '', 'tries', 0)
redis.call('HINCRBY', KEYS[1], 'requeues', 1)
leave(KEYS[2], ARGV[3], ARGV[4])
redis.call('HINCRBY', KEYS[4], 'queued', f[2] or 0)
return 'ok'
