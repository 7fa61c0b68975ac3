-- Changes nothing, and is replicated: whoever has this has what was written before it.
redis.call('HSET', KEYS[1], 'settled', '1')
redis.call('HDEL', KEYS[1], 'settled')
return {'ok'}
