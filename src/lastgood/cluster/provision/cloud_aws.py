"""VMs of AWS EC2, by boto3."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lastgood.cluster.provision.cloud import PROJECT_TAG, Cloud, Order, Vm, tags_of
from lastgood.errors import ConfigError, ProvisionError

__all__ = ["AwsCloud"]

_Answer = TypeVar("_Answer")

_CANONICAL = "099720109477"
_UBUNTU = "ubuntu/images/hvm-ssd*/ubuntu-noble-24.04-amd64-server-*"
_LIVE = ["pending", "running", "shutting-down", "stopping", "stopped"]
_UNSEEN_TRIES = 5

_PLAIN = {
    "InstanceLimitExceeded": "the account's quota of instances is used up; ask for more in Service Quotas",
    "VcpuLimitExceeded": "the account's quota of vCPUs of this family is used up; ask for more in Service Quotas",
    "MaxSpotInstanceCountExceeded": "the account's quota of spot VMs is used up; leave --spot out or ask for more",
    "InsufficientInstanceCapacity": "AWS has no machine of this type free there; try another --zone, or later",
    "SpotMaxPriceTooLow": "spot machines of this type cost more than on demand now; leave --spot out",
    "Unsupported": "this type is not offered there; try another --zone or region",
    "AuthFailure": "AWS does not know these credentials; check AWS_ACCESS_KEY_ID or ~/.aws/credentials",
    "InvalidClientTokenId": "AWS does not know these credentials; check AWS_ACCESS_KEY_ID or ~/.aws/credentials",
    "SignatureDoesNotMatch": "the secret key does not fit the access key; check ~/.aws/credentials",
    "ExpiredToken": "the session of these credentials is over; log in again (aws sso login)",
    "RequestExpired": "the session of these credentials is over, or this machine's clock is wrong",
    "UnauthorizedOperation": "these credentials may not do that; they need ec2 RunInstances, CreateTags, Describe* and "
    "TerminateInstances",
    "OptInRequired": "this account is not signed up for the region",
    "InvalidAMIID.NotFound": "there is no such image in this region; check --image",
}


class AwsCloud(Cloud):
    """EC2 in one region. `zone` is an availability zone or None for any; `endpoint` a stand-in for EC2's address."""

    name = "aws"

    def __init__(self, region: str, zone: str | None = None, endpoint: str | None = None) -> None:
        try:
            import boto3
            import botocore.config
        except ImportError as error:
            raise ConfigError(f"AWS needs boto3 ({error}): pip install 'lastgood[aws]'") from error
        self._region = region
        self._zone = zone
        self._endpoint = endpoint
        settings = botocore.config.Config(connect_timeout=10, read_timeout=60, retries={"total_max_attempts": 4})
        self._ec2 = self._ask(
            "a client",
            lambda: boto3.session.Session(region_name=region).client("ec2", endpoint_url=endpoint, config=settings),
        )

    def where(self) -> list[str]:
        """See Cloud."""
        return ["--region", self._region, *(["--endpoint", self._endpoint] if self._endpoint else [])]

    def create_one(self, order: Order, number: int) -> str:
        """See Cloud."""
        image = self._image(order.image)
        tags = [
            {"Key": key, "Value": value} for key, value in {**tags_of(order), "Name": f"{order.run}-{number}"}.items()
        ]
        disk = {"VolumeSize": order.disk_gb, "VolumeType": "gp3", "DeleteOnTermination": True}
        request: dict[str, Any] = {
            "ImageId": image["ImageId"],
            "InstanceType": order.machine,
            "MinCount": 1,
            "MaxCount": 1,
            "BlockDeviceMappings": [{"DeviceName": image["RootDeviceName"], "Ebs": disk}],
            # A `shutdown` on the VM ends the bill as well.
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {"HttpTokens": "required"},
            "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")],
        }
        if order.ssh_key is not None:
            # For the image's own user, which in Canonical's images is `ubuntu`.
            request["UserData"] = f"#cloud-config\nssh_authorized_keys:\n  - {order.ssh_key}\n"
        if order.network is not None:
            request["SecurityGroupIds"] = [order.network]
        if self._zone is not None:
            request["Placement"] = {"AvailabilityZone": self._zone}
        if order.spot:
            once = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
            request["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": once}
        answer = self._ask(f"creating a {order.machine}", lambda: self._ec2.run_instances(**request))
        return str(answer["Instances"][0]["InstanceId"])

    def ask_for_vms(self, run: str | None) -> list[Vm]:
        """See Cloud."""
        filters = [
            {"Name": "tag:project", "Values": [PROJECT_TAG]},
            {"Name": "instance-state-name", "Values": _LIVE},
            *([{"Name": "tag:run", "Values": [run]}] if run is not None else []),
        ]

        def read() -> list[Vm]:
            pages = self._ec2.get_paginator("describe_instances").paginate(Filters=filters)
            return [
                _vm(instance)
                for page in pages
                for reservation in page["Reservations"]
                for instance in reservation["Instances"]
            ]

        return self._ask("listing VMs", read)

    def destroy(self, vms: Sequence[Vm]) -> None:
        """See Cloud."""
        names = [vm.id for vm in vms]
        if not names:
            return  # EC2 would take an empty list for an error
        for attempt in range(_UNSEEN_TRIES):
            try:
                self._ask("destroying VMs", lambda: self._ec2.terminate_instances(InstanceIds=names))
            except ProvisionError as error:
                # EC2 may not know for a moment what it has just created.
                if "InvalidInstanceID.NotFound" not in str(error) or attempt == _UNSEEN_TRIES - 1:
                    raise
                time.sleep(2.0)
            else:
                return

    def _image(self, name: str | None) -> dict[str, Any]:
        if name is not None:
            found = self._ask("looking at the image", lambda: self._ec2.describe_images(ImageIds=[name]))["Images"]
        else:
            filters = [{"Name": "name", "Values": [_UBUNTU]}, {"Name": "state", "Values": ["available"]}]
            found = self._ask(
                "looking for Ubuntu 24.04", lambda: self._ec2.describe_images(Owners=[_CANONICAL], Filters=filters)
            )["Images"]
        if not found:
            raise ProvisionError(f"AWS {self._region}: there is no image {name or _UBUNTU}; name one with --image")
        newest: dict[str, Any] = max(found, key=lambda image: str(image.get("CreationDate", "")))
        return newest

    def _ask(self, what: str, call: Callable[[], _Answer]) -> _Answer:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
        from botocore.parsers import ResponseParserError

        place = f"AWS {self._region}: {what}"
        try:
            return call()
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", "unknown"))
            said = error.response.get("Error", {}).get("Message", "")
            raise ProvisionError(f"{place}: {_PLAIN.get(code, 'AWS refused it')} ({code}: {said})") from error
        except NoCredentialsError as error:
            raise ProvisionError(
                f"{place}: there are no credentials; run `aws configure`, or set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY"
            ) from error
        except (BotoCoreError, ResponseParserError) as error:
            raise ProvisionError(f"{place}: {error}; is the region right, and does this machine reach it?") from error


def _vm(instance: dict[str, Any]) -> Vm:
    tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", [])}
    return Vm(
        id=instance["InstanceId"],
        name=tags.get("Name", instance["InstanceId"]),
        project=tags.get("project", ""),
        run=tags.get("run", ""),
        owner=tags.get("owner", ""),
        created=tags.get("created", ""),
        machine=instance["InstanceType"],
        state=instance["State"]["Name"],
        zone=instance.get("Placement", {}).get("AvailabilityZone", ""),
        spot=instance.get("InstanceLifecycle") == "spot",
        address=instance.get("PublicIpAddress") or None,
        private_address=instance.get("PrivateIpAddress") or None,
    )
