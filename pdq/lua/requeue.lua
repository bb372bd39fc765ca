-- KEYS req, decode stream, prefill stream   ARGV attempt, owner, group, entry, id, max_requeues
if not fenced(KEYS[1], ARGV[1], ARGV[2]) then return 'lost' end
if tonumber(redis.call('HGET', KEYS[1], 'requeues') or '0') >= tonumber(ARGV[6]) then return 'over' end
leave(KEYS[2], ARGV[3], ARGV[4])
local entry = redis.call('XADD', KEYS[3], '*', 'id', ARGV[5])
redis.call('HSET', KEYS[1], 'stage', 'prefill', 'state', 'queued', 'entry', entry, 'owner', '', 'tries', 0)
redis.call('HINCRBY', KEYS[1], 'requeues', 1)
return 'ok'
