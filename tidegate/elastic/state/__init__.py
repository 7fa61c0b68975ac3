"""Where a job's training state is (ranks, copies and files), and which update it belongs to."""
