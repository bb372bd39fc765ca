-- KEYS req, stream   ARGV attempt, owner, group, entry, id, lease_ms, version
-- version: "", or the least that a worker must have for this job, which its claimer turned out not to have.
even_at_maxmemory(KEYS[1])
local f = redis.call('HMGET', KEYS[1], 'attempt', 'state')
if f[1] == ARGV[1] and f[2] == 'queued' then return 'ok' end -- the reply to the first call was lost
if not fenced(KEYS[1], ARGV[1], ARGV[2]) then return 'lost' end
if ARGV[7] ~= '' then
  leave_to_newer(KEYS[2], ARGV[3], ARGV[2], ARGV[4], ARGV[6])
  redis.call('HSET', KEYS[1], 'v', ARGV[7], 'state', 'queued', 'owner', '')
else
  local entry = redis.call('XADD', KEYS[2], '*', 'id', ARGV[5])
  redis.call('HSET', KEYS[1], 'entry', entry, 'state', 'queued', 'owner', '')
  leave(KEYS[2], ARGV[3], ARGV[4])
end
redis.call('HINCRBY', KEYS[1], 'tries', -1)
return 'ok'
