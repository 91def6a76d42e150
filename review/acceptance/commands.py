"""The command `certify` of `python -m review`. Imports happen when it runs."""

import argparse

from review.acceptance.journal import EXIT
from review.logs.output import ReviewError, emit


def certify(arguments: argparse.Namespace) -> int:
    from review.acceptance import verdict
    from review.acceptance.figures import write_expectations

    certificate = verdict.certify(arguments.target)
    if arguments.output:
        from review.acceptance.page import write_page

        write_page(certificate, arguments.output)
    if arguments.expect:
        # Figures of a sick machine would declare the next sick one healthy.
        if certificate.state == "fail":
            reason = certificate.reasons()[0]
            raise ReviewError(
                f"{arguments.target}: the test failed ({reason}), and a config would expect its figures"
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

    def show() -> None:
        if arguments.line:
            print(verdict.line(certificate))
        else:
            verdict.print_certificate(certificate)

    emit(arguments, text=show, json=lambda: certificate)
    return EXIT[certificate.state]
