"""GPU timelines as one page that needs nothing besides itself."""
