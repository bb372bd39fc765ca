-- KEYS stream...   ARGV group, consumer, count
-- Up to `count` new entries, those of the first streams first, as XREADGROUP answers them.
local found = {}
local left = tonumber(ARGV[3])
for i = 1, #KEYS do
  local reply = redis.pcall('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', left, 'STREAMS', KEYS[i], '>')
  if reply and reply.err then
    if #found == 0 then return reply end
    break -- what was read is ours already
  end
  if reply and reply[1] then
    found[#found + 1] = reply[1]
    left = left - #reply[1][2]
    if left <= 0 then break end
  end
end
return found
