return {'ok', identity()}
