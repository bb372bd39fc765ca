-- KEYS req, out, load, lane stream, all lane streams...
-- ARGV version, id, msg, digest, lane, timeout_ms, queue_timeout_ms, cost, max_queued, max_queued_tokens
-- Redis may evict the two keys of an ended request one without the other. Without `req` the id is free, and the new
-- request must not meet the old `out`. Without `out` the answer is lost, and the request runs again.
local seen = redis.call('HMGET', KEYS[1], 'digest', 'state')
if seen[1] then
  if seen[1] ~= ARGV[4] then return {'conflict', 0, 0} end
  if seen[2] ~= 'done' or redis.call('EXISTS', KEYS[2]) == 1 then return {'exists', 0, 0} end
end
local depth = 0
for i = 5, #KEYS do depth = depth + redis.call('XLEN', KEYS[i]) end
local queued = tonumber(redis.call('HGET', KEYS[3], 'queued') or '0')
if depth == 0 then queued = 0 end -- whatever a lost key may have left in the sum
local most, most_tokens = tonumber(ARGV[9]), tonumber(ARGV[10])
-- A prompt that alone is over the token limit may still go into an empty queue.
if (most > 0 and depth >= most) or (most_tokens > 0 and depth > 0 and queued + ARGV[8] > most_tokens) then
  return {'full', depth, queued}
end
local t = now()
local queue_deadline = 0
if tonumber(ARGV[7]) > 0 then queue_deadline = t + ARGV[7] end
local entry = redis.call('XADD', KEYS[4], '*', 'id', ARGV[2]) -- first: at maxmemory it is refused
redis.call('UNLINK', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[3], 'queued', queued + ARGV[8])
redis.call('HSET', KEYS[1], 'v', ARGV[1], 'msg', ARGV[3], 'digest', ARGV[4], 'lane', ARGV[5], 'cost', ARGV[8],
  'deadline', t + ARGV[6], 'queue_deadline', queue_deadline, 'stage', 'prefill', 'state', 'queued', 'entry', entry,
  'attempt', 0, 'owner', '', 'tries', 0, 'pos', 0, 't_submit', t)
return {'created', depth, queued}
