-- KEYS req, out, load, cancels, stream of each lane..., decode stream   ARGV group, id, event, ttl, cancels kept, lanes...
-- Returns 'cancelled' (ended by this or an earlier cancel), 'running' (its worker will end it), 'done' (ended otherwise),
-- 'unknown'.
even_at_maxmemory(KEYS[1])
local f = redis.call('HMGET', KEYS[1], 'stage', 'state', 'lane', 'entry', 'tail', 'reason')
if not f[1] then return 'unknown' end
if f[2] == 'done' and f[6] == 'cancelled' then return 'cancelled' end -- the reply to the first call may be lost
if f[2] == 'done' then return 'done' end
if f[2] == 'running' then
  redis.call('HSET', KEYS[1], 'cancel', 1)
  redis.pcall('XADD', KEYS[4], 'MAXLEN', '~', ARGV[5], '*', 'id', ARGV[2]) -- a hint; the flag is the truth
  return 'running'
end
local stream = KEYS[#KEYS]
if f[1] == 'prefill' then
  for i = 6, #ARGV do
    if ARGV[i] == f[3] then stream = KEYS[i - 1] end
  end
end
finish(KEYS[1], KEYS[2], KEYS[3], ARGV[3], 'cancelled', ARGV[4])
leave(stream, ARGV[1], f[4])
if f[1] == 'decode' and f[5] and f[5] ~= '' then -- nobody will load it, and it may be on another Redis: workers drop it
  redis.pcall('XADD', KEYS[4], 'MAXLEN', '~', ARGV[5], '*', 'id', ARGV[2], 'tail', f[5])
end
return 'cancelled'
