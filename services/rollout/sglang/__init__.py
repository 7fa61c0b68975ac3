"""SGLang behind the `Engine` protocol: a real server in its own environment, driven through its HTTP API."""
