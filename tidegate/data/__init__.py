"""Prompts from a data set: records of files, chat templates, and the endless list of prompts that a job draws from."""
