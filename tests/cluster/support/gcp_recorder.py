"""A recorder in the place of Compute Engine, on loopback.

It holds every request against the shapes of Google's own client: paths, parameters, and bodies that must parse as the
client's message types with no unknown field. It keeps VMs in memory and answers with the same types. It is no emulator:
what the real cloud would say to these requests, it does not know.
"""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from google.cloud import compute_v1

_PROJECT = r"/compute/v1/projects/(?P<project>[a-z0-9-]+)"
_ZONE = rf"{_PROJECT}/zones/(?P<zone>[a-z0-9-]+)"
_FILTER = re.compile(r"labels\.project=(?P<project>[a-z0-9-]+)( AND labels\.run=(?P<run>[a-z0-9-]+))?")


class Recorder(ThreadingHTTPServer):
    """Requests seen, VMs by (zone, name), faults seen in requests, and refusals to give."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Recording)
        self.requests = []
        self.instances = {}
        self.faults = []
        self.operations = {}
        self.refuse_insert = {}
        """By the insert's number from 1: (status, code, message, when), when being request or operation."""
        self.inserts = 0
        self.ignore_filters = False
        """Answer with every VM, whatever was asked for."""
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self._thread.join(60)
        self.server_close()


class _Recording(BaseHTTPRequestHandler):
    def do_POST(self):
        found = re.fullmatch(rf"{_ZONE}/instances", self._path())
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            assert found, "an unknown path"
            instance = compute_v1.Instance.from_json(body, ignore_unknown_fields=False)
            _check_instance(instance, found["zone"])
        except Exception as error:
            self.server.faults.append(f"{self.path}: {error}")
            return self._error(400, "invalid", str(error))
        self.server.inserts += 1
        refusal = self.server.refuse_insert.get(self.server.inserts)
        if refusal is not None and refusal[3] == "request":
            return self._error(*refusal[:3])
        if refusal is None:
            instance.zone = f"https://compute/zones/{found['zone']}"
            instance.machine_type = f"https://compute/{instance.machine_type}"
            instance.status = "RUNNING"
            number = self.server.inserts
            instance.network_interfaces[0].network_i_p = f"10.0.0.{number}"
            instance.network_interfaces[0].access_configs[0].nat_i_p = f"34.0.0.{number}"
            self.server.instances[found["zone"], instance.name] = instance
        return self._start(found["zone"], refusal)

    def do_DELETE(self):
        found = re.fullmatch(rf"{_ZONE}/instances/(?P<name>[a-z0-9-]+)", self._path())
        if found is None or (found["zone"], found["name"]) not in self.server.instances:
            return self._error(404, "notFound", self.path)
        del self.server.instances[found["zone"], found["name"]]
        return self._start(found["zone"], None)

    def do_GET(self):
        if found := re.fullmatch(rf"{_ZONE}/operations/(?P<name>[a-z0-9-]+)", self._path()):
            return self._send(200, compute_v1.Operation.to_json(self.server.operations[found["name"]]))
        wanted = parse_qs(urlsplit(self.path).query)
        chosen = _FILTER.fullmatch(wanted.get("filter", [""])[0])
        if re.fullmatch(rf"{_PROJECT}/aggregated/instances", self._path()) and chosen:
            zones = {}
            for (zone, _), instance in self.server.instances.items():
                labels = instance.labels
                meant = labels.get("project") == chosen["project"] and chosen["run"] in (None, labels.get("run"))
                if meant or self.server.ignore_filters:
                    zones.setdefault(f"zones/{zone}", compute_v1.InstancesScopedList()).instances.append(instance)
            return self._send(
                200, compute_v1.InstanceAggregatedList.to_json(compute_v1.InstanceAggregatedList(items=zones))
            )
        self.server.faults.append(f"GET {self.path}")
        return self._error(404, "notFound", self.path)

    def _path(self):
        self.server.requests.append((self.command, self.path))
        return urlsplit(self.path).path

    def _start(self, zone, refusal):
        name = f"operation-{len(self.server.operations) + 1}"
        running = compute_v1.Operation(name=name, zone=f"zones/{zone}", status=compute_v1.Operation.Status.RUNNING)
        ended = compute_v1.Operation(name=name, zone=f"zones/{zone}", status=compute_v1.Operation.Status.DONE)
        if refusal is not None:
            status, code, message, _ = refusal
            ended.error = compute_v1.Error(errors=[compute_v1.Errors(code=code, message=message)])
            ended.http_error_status_code, ended.http_error_message = status, "FORBIDDEN"
        self.server.operations[name] = ended
        return self._send(200, compute_v1.Operation.to_json(running))

    def _error(self, status, reason, message):
        errors = [{"message": message, "domain": "usageLimits", "reason": reason}]
        return self._send(status, json.dumps({"error": {"code": status, "message": message, "errors": errors}}))

    def _send(self, status, text):
        answer = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        pass


def _check_instance(instance, zone):
    """What the documentation of instances.insert asks for."""
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", instance.name), f"name {instance.name!r}"
    assert re.fullmatch(rf"zones/{zone}/machineTypes/[a-z0-9-]+", instance.machine_type), instance.machine_type
    assert instance.disks and instance.disks[0].boot and instance.disks[0].initialize_params.source_image, (
        "no boot disk"
    )
    assert instance.disks[0].initialize_params.disk_type.startswith(f"zones/{zone}/diskTypes/"), "disk type"
    assert instance.network_interfaces, "no network"
    for key, value in instance.labels.items():
        assert re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key) and re.fullmatch(r"[a-z0-9_-]{0,63}", value), (
            f"{key}={value}"
        )
    gpu = "/machineTypes/a" in instance.machine_type
    scheduling = instance.scheduling
    assert not gpu or scheduling.on_host_maintenance == "TERMINATE", "a VM with a GPU cannot be moved"
    if scheduling.provisioning_model == "SPOT":
        assert scheduling.on_host_maintenance == "TERMINATE" and not scheduling.automatic_restart, "spot"
