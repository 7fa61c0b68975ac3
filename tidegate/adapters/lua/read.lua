-- ARGV: run id ('' reads without a session), term, number of tables to read whole (the first of KEYS), then cells as
-- (index of the table's key, field).
if ARGV[1] ~= '' then
  local refused = refusal(ARGV[1], ARGV[2])
  if refused then return refused end
end
local tables, cells = {}, {}
for i = 1, tonumber(ARGV[3]) do
  tables[i] = redis.call('HGETALL', KEYS[i])
end
for i = 4, #ARGV, 2 do
  cells[#cells + 1] = redis.call('HGET', KEYS[tonumber(ARGV[i])], ARGV[i + 1])
end
local now = redis.call('TIME')
return {'ok', now[1] * 1000 + math.floor(now[2] / 1000), tables, cells}
