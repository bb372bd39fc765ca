-- KEYS stream...   ARGV group, idle_ms, most
-- Delete consumers of workers that died: nothing pending, silent for long. (Deleting one with pending entries would
-- drop them; one that lives after all is made again by its next read.)
local gone = 0
for i = 1, #KEYS do
  local found = redis.pcall('XINFO', 'CONSUMERS', KEYS[i], ARGV[1])
  if not found.err then
    for _, consumer in ipairs(found) do
      local c = {}
      for j = 1, #consumer, 2 do c[consumer[j]] = consumer[j + 1] end
      if c['pending'] == 0 and c['idle'] > tonumber(ARGV[2]) and gone < tonumber(ARGV[3]) then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[i], ARGV[1], c['name'])
        gone = gone + 1
      end
    end
  end
end
return gone
