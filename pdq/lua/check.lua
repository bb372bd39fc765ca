-- KEYS req, out, load, stream of each lane..., decode stream
-- ARGV group, id, ttl, grace_ms, events: deadline, queue_deadline; lanes...
-- What a reader asks when nothing has come for a while: where is the request? On the way it ends one that nobody else
-- will end (past its deadline, no worker), and queues one again whose entry was lost with its stream.
-- Returns stage, state, attempt, pos, reason, what was done ('', 'ended', 'requeued'); nothing for an unknown request.
even_at_maxmemory(KEYS[1])
local f = redis.call('HMGET', KEYS[1], 'stage', 'state', 'attempt', 'pos', 'reason', 'lane', 'entry', 'deadline',
  'queue_deadline')
if not f[1] then
  redis.call('PEXPIRE', KEYS[2], ARGV[3]) -- what there is of a reply has lost its owner
  return {}
end
if f[2] == 'done' then return {f[1], f[2], f[3], f[4], f[5] or '', ''} end
local stream = KEYS[#KEYS]
if f[1] == 'prefill' then
  for i = 7, #ARGV do
    if ARGV[i] == f[6] then stream = KEYS[i - 3] end
  end
end
local late = now() - ARGV[4] -- workers end what runs; this is for when there are none
local why = overdue(f[8], f[9], f[3], late)
if why then
  local event = ARGV[5]
  if why == 'queue_deadline' then event = ARGV[6] end
  finish(KEYS[1], KEYS[2], KEYS[3], event, why, ARGV[3])
  leave(stream, ARGV[1], f[7])
  return {'done', 'done', f[3], f[4], why, 'ended'}
end
if #redis.call('XRANGE', stream, f[7], f[7]) == 0 then
  -- Whoever runs it can no longer renew; the new owner's claim raises the attempt and fences the old one.
  local entry = redis.call('XADD', stream, '*', 'id', ARGV[2])
  redis.call('HSET', KEYS[1], 'state', 'queued', 'owner', '', 'entry', entry)
  return {f[1], 'queued', f[3], f[4], '', 'requeued'}
end
return {f[1], f[2], f[3], f[4], '', ''}
