"""VMs of Google Compute Engine, by google-cloud-compute.

Tested with that client against a recorder on loopback that checks each request against the client's own types; never on
the real cloud.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from lastgood.cluster.provision.cloud import PROJECT_TAG, Cloud, Order, Vm, tags_of
from lastgood.errors import ConfigError, ProvisionError

__all__ = ["GcpCloud"]

_Answer = TypeVar("_Answer")

_UBUNTU = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
_CALL_S = 60.0
_POLL_S = 2.0
_OPERATION_S = 300.0
_WITH_GPU = re.compile(r"(a2|a3|a4|a4x|g2|g4)-")
_STATES = {"provisioning": "pending", "staging": "pending"}

_PLAIN = (
    ("QUOTA", "the project's quota is used up; ask for more in IAM & Admin, Quotas, or destroy others"),
    ("RESOURCE_POOL_EXHAUSTED", "Google has no machine of this type free in this zone; try another --zone, or later"),
    ("RESOURCE_EXHAUSTED", "too many requests, or a quota is used up; try later"),
    ("UNAUTHENTICATED", "Google does not know these credentials; run `gcloud auth application-default login`"),
    (
        "PERMISSION_DENIED",
        "these credentials may not do that; they need the role Compute Instance Admin in this project",
    ),
)
_PLAIN_BY_STATUS = {
    401: "Google does not know these credentials; run `gcloud auth application-default login`",
    403: "these credentials may not do that, or the Compute Engine API is off in this project",
    404: "there is no such project, zone, machine type or image; check --project, --zone, --machine and --image",
    409: "a VM of this name is there already, without the project's tag; choose another --name",
    429: "too many requests, or a quota is used up; try later",
}


class GcpCloud(Cloud):
    """Compute Engine in one project. `zone` is where VMs are created; they are found in all zones.

    `endpoint` is a stand-in for Google's address; it gets no credentials and must be on loopback.
    """

    name = "gcp"

    def __init__(self, project: str | None, zone: str | None = None, endpoint: str | None = None) -> None:
        try:
            import google.auth
            from google.auth.credentials import AnonymousCredentials
            from google.cloud import compute_v1
        except ImportError as error:
            raise ConfigError(f"GCP needs google-cloud-compute ({error}): pip install 'lastgood[gcp]'") from error
        self._types = compute_v1
        self._zone = zone
        self._endpoint = endpoint
        if endpoint is not None:
            if urlsplit(endpoint).hostname not in ("127.0.0.1", "localhost", "::1"):
                raise ConfigError(
                    f"--endpoint {endpoint}: only a stand-in on this machine (http://127.0.0.1:PORT) can be used"
                )
            credentials, found = AnonymousCredentials(), None
        else:
            credentials, found = self._ask("credentials", google.auth.default)
        chosen = project or found
        if not chosen:
            raise ConfigError("GCP: which project? Give --project, or run `gcloud config set project NAME`")
        self._project = str(chosen)
        options = None if endpoint is None else {"api_endpoint": endpoint}
        self._client = compute_v1.InstancesClient(credentials=credentials, client_options=options)
        # Of our own: the one inside InstancesClient knows nothing of `options`.
        self._operations = compute_v1.ZoneOperationsClient(credentials=credentials, client_options=options)

    def where(self) -> list[str]:
        """See Cloud."""
        return ["--project", self._project, *(["--endpoint", self._endpoint] if self._endpoint else [])]

    def create_one(self, order: Order, number: int) -> str:
        """See Cloud."""
        if self._zone is None:
            raise ConfigError("GCP: --zone is needed to create VMs, such as us-central1-a")
        name = f"{order.run}-{number}"
        resource = self._resource(order, name, self._zone)
        what = f"creating a {order.machine} in {self._zone}"
        operation = self._ask(
            what,
            lambda: self._client.insert_unary(
                project=self._project, zone=self._zone, instance_resource=resource, timeout=_CALL_S
            ),
        )
        self._finish(what, self._zone, operation)
        return name

    def ask_for_vms(self, run: str | None) -> list[Vm]:
        """See Cloud."""
        wanted = f"labels.project={PROJECT_TAG}" + ("" if run is None else f" AND labels.run={run}")
        request = self._types.AggregatedListInstancesRequest(project=self._project, filter=wanted)

        def read() -> list[Vm]:
            scopes = self._client.aggregated_list(request=request, timeout=_CALL_S)
            return [_vm(instance) for _, scope in scopes for instance in scope.instances]

        return self._ask("listing VMs", read)

    def destroy(self, vms: Sequence[Vm]) -> None:
        """See Cloud."""
        # All are ordered first: a failure must not leave the others running.
        ordered: list[tuple[Vm, Any]] = []
        refused: list[ProvisionError] = []
        for vm in vms:
            delete = partial(
                self._client.delete_unary, project=self._project, zone=vm.zone, instance=vm.name, timeout=_CALL_S
            )
            try:
                ordered.append((vm, self._ask(f"destroying {vm.name}", delete)))
            except ProvisionError as error:
                refused.append(error)
        for vm, operation in ordered:
            self._finish(f"destroying {vm.name}", vm.zone, operation)
        if refused:
            raise refused[0]

    def _finish(self, what: str, zone: str, operation: Any) -> None:
        """Wait until an operation is done. Raises ProvisionError if it ended with an error, or not in time."""
        deadline = time.monotonic() + _OPERATION_S
        look = partial(
            self._operations.get, project=self._project, zone=zone, operation=operation.name, timeout=_CALL_S
        )
        while operation.status != self._types.Operation.Status.DONE:
            if time.monotonic() >= deadline:
                raise ProvisionError(
                    f"GCP {self._project}: {what}: not done after {_OPERATION_S:.0f} s; it may still end well, so "
                    "list the VMs again later"
                )
            operation = self._ask(what, look)
            if operation.status != self._types.Operation.Status.DONE:
                time.sleep(_POLL_S)
        if operation.error.errors or operation.http_error_status_code:
            details = [f"{one.code}: {one.message}" for one in operation.error.errors]
            said = "; ".join([*details, operation.http_error_message]).strip("; ")
            plain = _plain(said, operation.http_error_status_code)
            raise ProvisionError(f"GCP {self._project}: {what}: {plain} ({said[:2000]})")

    def _resource(self, order: Order, name: str, zone: str) -> Any:
        types = self._types
        disk = types.AttachedDisk(
            boot=True,
            auto_delete=True,
            initialize_params=types.AttachedDiskInitializeParams(
                source_image=order.image or _UBUNTU,
                disk_size_gb=order.disk_gb,
                disk_type=f"zones/{zone}/diskTypes/pd-ssd",
                labels=tags_of(order),
            ),
        )
        public = types.AccessConfig(name="External NAT", type_="ONE_TO_ONE_NAT")
        network = types.NetworkInterface(network=order.network or "global/networks/default", access_configs=[public])
        scheduling = types.Scheduling()
        # VMs with GPUs cannot be moved while they run.
        if order.spot or _WITH_GPU.match(order.machine):
            scheduling = types.Scheduling(on_host_maintenance="TERMINATE", automatic_restart=not order.spot)
        if order.spot:
            scheduling.provisioning_model = "SPOT"
            scheduling.instance_termination_action = "DELETE"
        resource = types.Instance(
            name=name,
            machine_type=f"zones/{zone}/machineTypes/{order.machine}",
            disks=[disk],
            network_interfaces=[network],
            labels=tags_of(order),
            scheduling=scheduling,
        )
        if order.ssh_key is not None:
            resource.metadata = types.Metadata(
                items=[types.Items(key="ssh-keys", value=f"{order.user}:{order.ssh_key}")]
            )
        return resource

    def _ask(self, what: str, call: Callable[[], _Answer]) -> _Answer:
        from google.api_core.exceptions import GoogleAPICallError, RetryError
        from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
        from requests.exceptions import RequestException

        place = f"GCP {getattr(self, '_project', '')}: {what}".replace(" :", ":")
        try:
            return call()
        except GoogleAPICallError as error:
            raise ProvisionError(f"{place}: {_refusal(error)}") from error
        except DefaultCredentialsError as error:
            raise ProvisionError(
                f"{place}: there are no credentials; run `gcloud auth application-default login`, or set "
                "GOOGLE_APPLICATION_CREDENTIALS"
            ) from error
        except (GoogleAuthError, RequestException) as error:
            raise ProvisionError(
                f"{place}: {error}; are the credentials right, and does this machine reach Google?"
            ) from error
        except RetryError as error:
            raise ProvisionError(f"{place}: no answer within {_CALL_S:.0f} s ({error})") from error


def _plain(said: str, status: int | None) -> str:
    """What a refusal means, from Google's words and the status of HTTP."""
    searched = said.upper()
    known = next((words for mark, words in _PLAIN if mark in searched), None)
    return known or _PLAIN_BY_STATUS.get(int(status or 0), "Google refused it")


def _refusal(error: Any) -> str:
    """Why a request was refused, in plain words and in Google's."""
    details = [
        f"{one.get('reason', '')}: {one.get('message', '')}" for one in error.errors or () if isinstance(one, dict)
    ]
    said = "; ".join([*details, str(error)])
    return f"{_plain(said, error.code)} ({said[:2000]})"


def _vm(instance: Any) -> Vm:
    labels = dict(instance.labels)
    interface = instance.network_interfaces[0] if instance.network_interfaces else None
    public = [config.nat_i_p for config in interface.access_configs] if interface is not None else []
    state = str(instance.status).lower()
    return Vm(
        id=instance.name,
        name=instance.name,
        project=labels.get("project", ""),
        run=labels.get("run", ""),
        owner=labels.get("owner", ""),
        created=labels.get("created", ""),
        machine=instance.machine_type.rsplit("/", 1)[-1],
        state=_STATES.get(state, state),
        zone=instance.zone.rsplit("/", 1)[-1],
        spot=instance.scheduling.provisioning_model == "SPOT",
        address=next(filter(None, public), None),
        private_address=(interface.network_i_p or None) if interface is not None else None,
    )
