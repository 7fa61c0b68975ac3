"""Generated from proto/tidegate/v1 by `make proto`; not edited by hand."""
