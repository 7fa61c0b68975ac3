"""The cluster's scheduler: which job may use which GPUs when. It decides by all jobs' records; a job's own scheduler
moves GPUs among the job's components."""
