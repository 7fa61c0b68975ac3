"""SGLang behind the `Engine` protocol: a real server of its own environment, driven through its HTTP API."""
