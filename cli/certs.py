"""`tidegate certs`: makes a cluster's authority, issues credentials, lists and revokes them.

What is written is told with its path. No private key is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cli.rows import Form, answer_text, show
from cli.usage import BadUsage, count
from tidegate.certs.identity import BadIdentity, Identity, Party

COLUMNS = ("serial", "cluster", "party", "name", "ends", "state")
_DAYS = 90


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    """`command` adds one to the `tidegate` command."""
    added = command("certs", "Make a cluster's authority, and issue, list or revoke credentials.")
    verbs = added.add_subparsers(dest="verb", required=True, metavar="VERB")

    def any_verb(name: str, description: str) -> argparse.ArgumentParser:
        found = verbs.add_parser(name, help=description, description=description)
        # Also after the verb, where the word before it is not to be lost.
        forms = [form.value for form in Form]
        found.add_argument("-o", dest="form", choices=forms, default=argparse.SUPPRESS, help="form of the output")
        return found

    def verb(name: str, description: str) -> argparse.ArgumentParser:
        found = any_verb(name, description)
        found.add_argument("--authority", type=Path, required=True, metavar="FOLDER", help="the authority's folder")
        return found

    verb("init", "Make an authority.").add_argument("--cluster", required=True, metavar="NAME")
    issue = verb("issue", "Issue a credential, or renew one in its folder.")
    issue.add_argument("party", choices=[str(party) for party in Party])
    issue.add_argument("name", metavar="NAME", help="of the node, the job or the person")
    issue.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="the credential's folder")
    help_ = "a name or an IP address of its server; may be given several times"
    issue.add_argument("--address", action="append", default=[], metavar="HOST", help=help_)
    issue.add_argument("--days", type=count, default=_DAYS, help=f"how long it lasts (default: {_DAYS})")
    rights = any_verb("rights", "Print what NATS and Redis servers of your own have to be told.")
    rights.add_argument("--own", type=Path, required=True, metavar="FOLDER", help="the servers' own credential")
    rights.add_argument("user", nargs="+", type=Path, metavar="FOLDER", help="the credential of somebody who may come")
    verb("list", "List the credentials that have not expired.")
    revoke = verb("revoke", "Believe credentials no more.")
    revoke.add_argument("serial", nargs="+", metavar="SERIAL", help="as `certs list` has it")


def certs(args: argparse.Namespace, form: Form) -> int:
    """BadUsage for what cannot be done with these arguments."""
    # Import here: the library takes a moment, which the other commands must not pay.
    from tidegate.certs.authority import Authority, CertsError

    try:
        if args.verb == "rights":
            return _rights(args, form)
        return _answer(Authority, args, form)
    except (BadIdentity, CertsError) as error:
        raise BadUsage(str(error)) from error


def _answer(authority: Any, args: argparse.Namespace, form: Form) -> int:
    if args.verb == "init":
        authority.create(args.authority, args.cluster)
        text = f"the authority of cluster {args.cluster} is in {args.authority}: whoever has ca.key is everybody"
        print(answer_text({"authority": str(args.authority), "cluster": args.cluster}, text, form))
        return 0
    own = authority.load(args.authority)
    if args.verb == "issue":
        identity = Identity(own.cluster, Party(args.party), args.name)
        _refuse_another(args.to, identity)
        issued = own.issue(identity, args.to, addresses=args.address, days=args.days)
        text = f"{args.to} has the credential of {issued.identity}, until {issued.ends:%Y-%m-%d %H:%M} UTC"
        print(answer_text(_row(issued) | {"folder": str(args.to)}, text, form))
        return 0
    if args.verb == "revoke":
        own.revoke(*map(_serial, args.serial))
        path = args.authority / "revoked.json"
        text = f"copy {path} into the folder of each server's credential: it counts from its next call on"
        print(answer_text({"revoked": args.serial, "file": str(path)}, text, form))
        return 0
    show([_row(each) for each in own.issued()], COLUMNS, form=form, out=sys.stdout, empty="no credential is in force")
    return 0


def _refuse_another(folder: Path, identity: Identity) -> None:
    """BadUsage where the folder has somebody else's credential: its server would be another one at its next call."""
    from tidegate.adapters.grpc_tls import Credentials
    from tidegate.certs.authority import CertsError

    try:
        there = Credentials(folder).identity
    except CertsError:
        return
    if there != identity:
        raise BadUsage(f"{folder} has the credential of {there}: give {identity} a folder of its own")


def _rights(args: argparse.Namespace, form: Form) -> int:
    from tidegate.runtime.server_kinds import ServerGuard, nats_rights, store_rights

    guard = ServerGuard.of(args.own.absolute(), *args.user)
    texts = {"nats": nats_rights(guard), "redis": store_rights(guard)}
    text = (
        f"# in the config of NATS\n{texts['nats']}\n\n# the file of aclfile, in the config of Redis\n{texts['redis']}"
    )
    print(answer_text(texts, text.rstrip("\n"), form))
    return 0


def _row(issued: Any) -> dict[str, object]:
    days = (issued.ends - datetime.now(UTC)).days
    state = "revoked" if issued.is_revoked else f"{days} days left"
    who: Identity = issued.identity
    ends = issued.ends.isoformat(timespec="seconds")
    return dict(zip(COLUMNS, (f"{issued.serial:x}", who.cluster, str(who.party), who.name, ends, state), strict=True))


def _serial(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError as error:
        raise BadUsage(f"serial {text!r} is no hexadecimal number: see tidegate certs list") from error
