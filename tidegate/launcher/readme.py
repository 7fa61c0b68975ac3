"""The text that lies in a job's folder and says what each file there is; docs/run-directory.md says more.

Invariant: every path of `JobFolder` and `AttemptFolder` is named (tests/unit/test_job.py).
"""

from __future__ import annotations

README = """\
The folder of one Tidegate job. All but launcher.lock and servers/ is text, JSON, or opens in tools of others.

Of the job, over all its attempts:
  config.json       the config that every process reads; private, for URLs in it may hold passwords
  result.json       how the newest attempt ended, with the metrics of each iteration; not there while it runs
  events.jsonl      what happened, a line an event, as it came: tidegate events JOB
  journal.jsonl     a line for each optimizer update: its samples, loss, gradient norm, learning rate
  samples/          some samples of each iteration, a line each: texts, rewards by name, advantage, what became of them
  evaluations/      version<v>.jsonl, of each evaluated version a line a prompt: what was read, responses, rewards
  checkpoints/      inc<incarnation>-it<next iteration>/, complete once it has that name; the newest ones stay
  export/           the final weights as a Hugging Face checkpoint, where the config asks for it
  tensorboard/      metrics of iterations and evaluations, where tracking asks for them; wandb/ likewise
  reference/        the policy that the KL term is taken to, where there is one
  tokenizer.json    the tokenizer in use; tokenizer_config.json beside it, where it came with one
  endpoint.json     where the live job answers; private, gone when the job is over
  launcher.lock     held while the job runs
  nodes/            NODE/gate/: who may use each GPU
  engines/          NODE/INDEX/: what SGLang's server on that slot was told, and its log, where it generates
  servers/          data of the embedded NATS and Redis, private: what --resume goes on from

Of each start and each --resume, attempts/001/, attempts/002/, ..., the newest also as latest/:
  attempt.json      when, by which versions, from which checkpoint, and how it ended; no "end": it runs, or was killed
  config.yaml       every key that it ran with; credentials in URLs left out
  logs/             a file a process: *.jsonl logs (tidegate logs JOB); *.out, <role>/worker-*.log what it printed
  timeline.json     what each GPU slot did; open it in Perfetto or chrome://tracing. Written at the end, from timeline/
  timeline/         the same as it comes, a line a span

Commands: tidegate describe | events | logs JOB, tidegate get jobs, tidegate run CONFIG --resume.
To be rid of the job when it is over, remove this folder.
"""
