-- KEYS req, lane stream, all lane streams...   ARGV id, msg, digest, lane, timeout_ms, max_queued
local seen = redis.call('HGET', KEYS[1], 'digest')
if seen then
  if seen == ARGV[3] then return {'exists', 0} end
  return {'conflict', 0}
end
local depth = 0
for i = 3, #KEYS do depth = depth + redis.call('XLEN', KEYS[i]) end
if tonumber(ARGV[6]) > 0 and depth >= tonumber(ARGV[6]) then return {'full', depth} end
local t = now()
local entry = redis.call('XADD', KEYS[2], '*', 'id', ARGV[1])
redis.call('HSET', KEYS[1], 'msg', ARGV[2], 'digest', ARGV[3], 'lane', ARGV[4], 'deadline', t + ARGV[5],
  'stage', 'prefill', 'state', 'queued', 'entry', entry, 'attempt', 0, 'owner', '', 'tries', 0, 'pos', 0, 't_submit', t)
return {'created', depth}
