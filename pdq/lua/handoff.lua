-- KEYS req, prefill stream, decode stream   ARGV attempt, owner, group, entry, id, handoff
local f = redis.call('HMGET', KEYS[1], 'attempt', 'stage', 'cancel')
if f[1] == ARGV[1] and f[2] == 'decode' then return 'ok' end -- the reply to the first call was lost
if not fenced(KEYS[1], ARGV[1], ARGV[2]) then return 'lost' end
if f[3] then return 'cancel' end
local entry = redis.call('XADD', KEYS[3], '*', 'id', ARGV[5])
redis.call('HSET', KEYS[1], 'stage', 'decode', 'state', 'queued', 'entry', entry, 'owner', '', 'tries', 0,
  'handoff', ARGV[6], 't_handoff', now())
leave(KEYS[2], ARGV[3], ARGV[4])
return 'ok'
