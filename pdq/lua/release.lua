-- KEYS req, stream   ARGV attempt, owner, group, entry, id
even_at_maxmemory(KEYS[1])
if not fenced(KEYS[1], ARGV[1], ARGV[2]) then return 'lost' end
leave(KEYS[2], ARGV[3], ARGV[4])
local entry = redis.call('XADD', KEYS[2], '*', 'id', ARGV[5])
redis.call('HSET', KEYS[1], 'state', 'queued', 'owner', '', 'entry', entry)
redis.call('HINCRBY', KEYS[1], 'tries', -1)
return 'ok'
