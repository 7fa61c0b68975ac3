"""Where a job's training state is: in ranks, in copies of them, in files; and of which update it is."""
