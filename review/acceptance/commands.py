"""The command `certify` of `python -m review`. Imports happen when it runs."""

import argparse

from review.acceptance.journal import EXIT
from review.logs.output import ReviewError, emit, json_text, write_whole


def certify(arguments: argparse.Namespace) -> int:
    from review.acceptance import verdict
    from review.acceptance.figures import write_expectations

    if arguments.output and arguments.output.is_dir():
        page = arguments.output / "certify.html"
        raise ReviewError(
            f"{arguments.output} is a folder: name a file, such as {page}"
        )
    if arguments.fleet:
        return _fleet(arguments)
    if len(arguments.target) != 1:
        raise ReviewError("certify: several folders need --fleet")
    (target,) = arguments.target
    certificate = verdict.certify(target)
    if arguments.output:
        from review.acceptance.page import write_page

        write_page(certificate, arguments.output)
    if arguments.expect:
        # Figures of a sick machine would declare the next sick one healthy.
        if certificate.state == "fail":
            reason = certificate.reasons()[0]
            raise ReviewError(
                f"{target}: the test failed ({reason}), and a config would expect its figures"
            )
        write_expectations(certificate.records, arguments.expect)

    if arguments.records:
        # Of launch/run/record.sh: kind, rank, node, step, reason.
        arguments.records.write_text(
            "".join(
                f"unfit\t-\t{node}\t-\t{reason}\n"
                for reason, nodes in verdict.failed_nodes(certificate).items()
                for node in nodes
            )
        )

    if arguments.save:
        write_whole(arguments.save, json_text(certificate) + "\n")
    if arguments.prometheus:
        from review.acceptance.fleet import prometheus

        ended = certificate.records.ended
        tests = (
            {"name": name, "ended": ended, **own}
            for name, own in certificate.machines.items()
        )
        write_whole(arguments.prometheus, prometheus(tests))

    def show() -> None:
        if arguments.line:
            print(verdict.line(certificate))
        else:
            verdict.print_certificate(certificate)

    emit(arguments, text=show, json=lambda: certificate)
    return EXIT[certificate.state]


def _fleet(arguments: argparse.Namespace) -> int:
    from review.acceptance import fleet

    # Each is of one test.
    for name in ("line", "records", "save"):
        if getattr(arguments, name):
            raise ReviewError(f"certify: --{name} is of one test, not of a --fleet")
    baselines = fleet.fleet(arguments.target)
    if arguments.expect:
        fleet.write_expected(baselines, arguments.expect)
    if arguments.output:
        fleet.write_page(baselines, arguments.output)
    if arguments.prometheus:
        tests = (one.as_dict() for own in baselines for one in own.machines)
        write_whole(arguments.prometheus, fleet.prometheus(tests))
    emit(
        arguments,
        text=lambda: fleet.print_fleet(baselines),
        json=lambda: fleet.as_dict(baselines),
    )
    return EXIT[fleet.state(baselines)]
