"""One file for each kind of fault: a frozen value that is drawn from a seed and inflicted on a running job."""
