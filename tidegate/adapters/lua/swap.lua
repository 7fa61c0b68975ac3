-- ARGV: run id, term, number of expected cells, those cells, the cells to write.
local refused = refusal(ARGV[1], ARGV[2])
if refused then return refused end
local last_expected = 3 + 4 * tonumber(ARGV[3])
if not as_expected(4, last_expected) then
  return {'conflict'}
end
write(last_expected + 1, #ARGV)
return {'ok'}
