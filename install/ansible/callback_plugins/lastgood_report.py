"""Ansible callback: writes what happened on each host as JSON to the file that LASTGOOD_REPORT names.

HostReport in src/lastgood/cluster/provision/facts.py is its schema; nothing is read out of Ansible's output for people.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
    name: lastgood_report
    type: aggregate
    short_description: a JSON report of a provisioning
    description: writes counts, failures and facts of each host to the file that LASTGOOD_REPORT (environment) names
    requirements:
      - enabled in ansible.cfg
"""

REPORT_TASK = "Report the host"
MARK = "lastgood-host "
MOST_TEXT = 4000


class CallbackModule(CallbackBase):
    """Keeps failures and facts of each host, and writes them at the end."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "lastgood_report"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self):
        super().__init__()
        self._failures = {}
        self._said = {}

    def v2_runner_on_ok(self, result):
        """Keep what the reporting task printed."""
        host, values, task = parts(result)
        if task == REPORT_TASK:
            for line in values.get("stdout", "").splitlines():
                if line.startswith(MARK):
                    self._said[host] = json.loads(line[len(MARK) :])

    def v2_runner_on_failed(self, result, ignore_errors=False):
        """Keep the first failure of a host."""
        if not ignore_errors:
            self._fail(result)

    def v2_runner_on_unreachable(self, result):
        """Keep why a host was not reached."""
        self._fail(result)

    def v2_playbook_on_stats(self, stats):
        """Write the report, completely or not at all."""
        path = os.environ.get("LASTGOOD_REPORT")
        if not path:
            return
        hosts = []
        for host in sorted(stats.processed):
            counts = stats.summarize(host)
            said = self._said.get(host, {})
            failed = counts["failures"] or counts["unreachable"]
            hosts.append(
                {
                    "host": host,
                    "ok": counts["ok"],
                    "changed": counts["changed"],
                    "unreachable": bool(counts["unreachable"]),
                    "failure": self._failures.get(host, "it failed; see Ansible's output") if failed else None,
                    "reboot_needed": said.get("reboot_needed", False),
                    "facts": said.get("facts"),
                }
            )
        temporary = Path(f"{path}.new")
        temporary.write_text(json.dumps({"hosts": hosts}), encoding="utf-8")
        temporary.replace(path)

    def _fail(self, result):
        host, values, task = parts(result)
        lines = [str(values.get("msg", "")).strip()]
        lines += [str(values.get(stream) or "").strip()[-MOST_TEXT:] for stream in ("stderr", "stdout")]
        self._failures.setdefault(host, f"{task}: " + "\n".join(line for line in lines if line)[:MOST_TEXT])


def parts(result):
    """Host, values and task name of a result; names without an underscore are those of ansible-core 2.19 and newer."""
    host = getattr(result, "host", None) or result._host
    values = getattr(result, "result", None)
    return host.get_name(), result._result if values is None else values, result.task_name
