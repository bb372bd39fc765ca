-- Put before every script. Fields of a request hash:
--   v (protocol version: the newest of message, handoff and events), msg, digest, lane, cost (prompt tokens, estimated),
--   deadline, queue_deadline (ms; 0: none)
--   stage (prefill, decode, done), state (queued, running, done), entry (id in the stage's stream)
--   attempt (fencing number, rises at every claim), owner, claim (nonce of the call that made the owner), tries (claims
--   in this stage), requeues
--   tail (key of the handoff's partial block, '' if there is none)
--   pos (tokens visible in the reply stream), cancel, handoff, held (KV tokens handed over, not yet claimed), reason
--   t_submit, t_prefill, t_handoff, t_decode, t_end (ms)
-- and of the pool's load hash:
--   queued (cost of all requests in prefill), held (KV tokens of all that wait for decode)
-- All times are the server's.
-- Redis rolls nothing back when a script fails half way. So in every script the write that may be refused (XADD, XCLAIM)
-- comes before the one that removes (XACK, XDEL, UNLINK), and the sums of the load hash come last: after a failure the
-- request is where it was, or where it goes to, and a stream entry without a request is dropped by its claim.
local function now()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- At maxmemory a server refuses a script's first write if it may need memory, and runs the rest once anything has been
-- written. Running requests must be able to end, so their scripts begin with a write that frees memory, if only in name.
local function even_at_maxmemory(req)
  redis.call('HDEL', req, '-')
end

-- May this worker, in this attempt, still write? A zombie's attempt is old.
local function fenced(req, attempt, owner)
  local f = redis.call('HMGET', req, 'attempt', 'owner', 'state')
  return f[1] == attempt and f[2] == owner and f[3] == 'running'
end

-- May an event with the tokens [index, pos) become visible after `there` tokens? 'new', or why not: 'there' (sent again
-- after a lost reply, which is fine), 'expired', 'gap'.
local function place(there, deadline, index, pos, time)
  if tonumber(pos) <= tonumber(there) then return 'there' end
  if time > tonumber(deadline) then return 'expired' end
  if tonumber(index) ~= tonumber(there) then return 'gap' end
  return 'new'
end

-- Take the job's entry out of its stage's stream.
local function leave(stream, group, entry)
  if entry and entry ~= '' then
    redis.pcall('XACK', stream, group, entry)
    redis.call('XDEL', stream, entry)
  end
end

-- Leave an entry that needs a newer pdq unclaimed: at once reclaimable, by us too, but no faster than we reclaim.
local function leave_to_newer(stream, group, owner, entry, lease_ms)
  redis.call('XCLAIM', stream, group, owner, 0, entry, 'IDLE', lease_ms, 'JUSTID')
end

-- Take from a sum of the load hash. Never below zero: if the hash was lost, what is left of the sum is a guess.
local function less(load, field, amount)
  if redis.call('HINCRBY', load, field, 0 - amount) < 0 then redis.call('HSET', load, field, 0) end
end

-- The request no longer counts as waiting KV. held: its field.
local function take_held(req, load, held)
  if held then
    redis.call('HDEL', req, 'held')
    less(load, 'held', held)
  end
end

-- The terminal event. 1-0 is above every token position, so Redis itself refuses a second one and all later tokens.
-- Only for a request that has not ended. So if `out` refuses the event, the stream is not this request's, and a reader
-- would wait for ever or take the wrong end: the stream is replaced.
local function finish(req, out, load, event, reason, ttl)
  local f = redis.call('HMGET', req, 'stage', 'cost', 'held')
  if type(redis.pcall('XADD', out, '1-0', 'e', event)) == 'table' then -- an error
    redis.call('UNLINK', out)
    redis.call('XADD', out, '1-0', 'e', event)
  end
  redis.call('HSET', req, 'stage', 'done', 'state', 'done', 'reason', reason, 't_end', now())
  redis.call('HDEL', req, 'msg', 'handoff', 'tail')
  redis.call('PEXPIRE', req, ttl)
  redis.call('PEXPIRE', out, ttl)
  if f[1] == 'prefill' then less(load, 'queued', f[2] or 0) end
  take_held(req, load, f[3])
end

local function dead_letter(dead, max, id, stage, tries, reason)
  redis.pcall('XADD', dead, 'MAXLEN', '~', max, '*', 'id', id, 'stage', stage, 'tries', tries, 'reason', reason)
end

-- Why a request that is not running should end now: 'deadline', 'queue_deadline' or nil. fields: deadline,
-- queue_deadline, attempt.
local function overdue(deadline, queue_deadline, attempt, time)
  if time > tonumber(deadline) then return 'deadline' end
  local limit = tonumber(queue_deadline or '0')
  if limit > 0 and attempt == '0' and time > limit then return 'queue_deadline' end
  return nil
end
