"""The text of README.txt in a job's folder, which says what each file there is. docs/run-directory.md says more.

Invariant: it names every path of `JobFolder` and `AttemptFolder`. [test_job: named_by_its_readme]
"""

from __future__ import annotations

README = """\
The folder of one Tidegate job. All files are text, JSON or a public format, except launcher.lock and servers/.

Files of the job, over all its attempts:
  config.json       the config that every process reads; private, because URLs in it may hold passwords
  result.json       how the newest attempt ended, with the metrics of each iteration; absent while the job runs
  events.jsonl      the events, one line each, as they came: tidegate events JOB
  moves.jsonl       decisions and moves of GPUs, one line each: tidegate why JOB; moves.1.jsonl has the older ones
  journal.jsonl     one line for each optimizer update: its samples, loss, gradient norm, learning rate
  samples/          some samples of each iteration, one line each: texts, rewards by name, advantage, fate
  evaluations/      version<v>.jsonl for each evaluated version, one line for each prompt: prompt, responses, rewards
  checkpoints/      inc<incarnation>-it<next iteration>/, complete once it has that name; the newest ones stay
  export/           the final weights as a Hugging Face checkpoint, if the config asks for it
  tensorboard/      metrics of iterations and evaluations, if the config asks for tracking; wandb/ likewise
  reference/        the reference policy of the KL term, if there is one
  tokenizer.json    the tokenizer in use; its tokenizer_config.json is beside it, if it came with one
  endpoint.json     the address of the live job and where its credential is; private, removed when the job is over
  launcher.lock     locked while the job runs
  nodes/            NODE/gate/: which process may use each GPU; removed with servers/
  engines/          NODE/INDEX/: config and log of the engine's server on that slot, if it has one
  servers/          data of the embedded NATS and Redis, private: tidegate prune removes it; --resume then goes on
                    from the newest checkpoint

Files of each start and each --resume, in attempts/001/, attempts/002/, ...; latest/ is a link to the newest:
  attempt.json      when it began, versions, checkpoint, and how it ended; without "end" it runs or was killed
  config.yaml       every key that it ran with, without the credentials in URLs
  logs/             one file for each process: *.jsonl are logs (tidegate logs JOB); *.out and <role>/worker-*.log are
                    what the process printed
  timeline.json     what each GPU slot did; open it in Perfetto or chrome://tracing. Written at the end, from timeline/
  timeline/         the same, written as it happens, one line for each span

Commands: tidegate describe | events | logs JOB, tidegate get jobs, tidegate run CONFIG --resume.
To remove the job when it is over, remove this folder.
"""
