-- Put before every script. Fields of a request hash:
--   msg, digest, lane, deadline (ms)      what was asked
--   stage (prefill, decode, done), state (queued, running, done), entry (id in the stage's stream)
--   attempt (fencing number, rises at every claim), owner, tries (claims in this stage), requeues
--   pos (tokens visible in the reply stream), cancel, handoff, reason
--   t_submit, t_prefill, t_handoff, t_decode, t_end (ms)
-- All times are the server's.
local function now()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- May this worker, in this attempt, still write? A zombie's attempt is old.
local function fenced(req, attempt, owner)
  local f = redis.call('HMGET', req, 'attempt', 'owner', 'state')
  return f[1] == attempt and f[2] == owner and f[3] == 'running'
end

-- Take the job's entry out of its stage's stream.
local function leave(stream, group, entry)
  if entry and entry ~= '' then
    redis.pcall('XACK', stream, group, entry)
    redis.call('XDEL', stream, entry)
  end
end

-- The terminal event. 1-0 is above every token position, so Redis itself refuses a second one and all later tokens.
-- HDEL comes first: after a write that frees memory, a server at maxmemory lets the rest of the script run.
local function finish(req, out, event, reason, ttl)
  redis.call('HDEL', req, 'msg', 'handoff')
  redis.call('HSET', req, 'stage', 'done', 'state', 'done', 'reason', reason, 't_end', now())
  redis.pcall('XADD', out, '1-0', 'e', event)
  redis.call('PEXPIRE', req, ttl)
  redis.call('PEXPIRE', out, ttl)
end

local function dead_letter(dead, max, id, stage, tries, reason)
  redis.pcall('XADD', dead, 'MAXLEN', '~', max, '*', 'id', id, 'stage', stage, 'tries', tries, 'reason', reason)
end
