#include "wire/bindings.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include "python.hpp"
#include "wire/receiver.hpp"
#include "wire/record.hpp"
#include "wire/sender.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace lastgood {
namespace {

// As Python holds them: where there is something to wait for, their threads are ended without the GIL.
class ReceiverHandle : public Receiver {
  public:
    // `owner`, of the slots' memory, is kept by the Python object, whose end comes behind this one's.
    ReceiverHandle(std::uint64_t job, std::uint32_t epoch, const std::vector<DeclaredBucket>& buckets,
                   const std::vector<std::vector<std::uintptr_t>>& slots, const ReceiverOptions& options,
                   nb::handle owner)
        : Receiver(job, epoch, buckets, slots, options), owner_(owner) {}
    ~ReceiverHandle() {
        if (forked() || close(deadline_after(0.0))) return;
        bool ended;
        {
            const GilReleased released;
            ended = shut_down();
        }
        if (!ended) owner_.inc_ref();  // for ever: the thread that is left may write into it at any time
    }

  private:
    const nb::handle owner_;
};

class SenderHandle : public Sender {
  public:
    using Sender::Sender;
    ~SenderHandle() {
        if (forked() || join(deadline_after(0.0))) return;
        const GilReleased released;
        shut_down();
    }
};

using BucketTuple = std::tuple<std::uint32_t, std::uint64_t, std::uint8_t>;

std::vector<DeclaredBucket> to_buckets(const std::vector<BucketTuple>& tuples) {
    std::vector<DeclaredBucket> buckets;
    for (const auto& [index, nbytes, dtype] : tuples) buckets.push_back({index, nbytes, dtype});
    return buckets;
}

const char* kind_name(ReceiverEvent::Kind kind) {
    switch (kind) {
        case ReceiverEvent::Kind::complete:
            return "complete";
        case ReceiverEvent::Kind::end:
            return "end";
        case ReceiverEvent::Kind::closed:
            break;
    }
    return "closed";
}

nb::dict to_dict(const ReceiverCounters& counters) {
    nb::dict found;
    found["records"] = counters.records;
    found["bytes"] = counters.bytes;
    found["read_bytes"] = counters.read_bytes;
    found["drained_bytes"] = counters.drained_bytes;
    found["ends"] = counters.ends;
    found["connections"] = counters.connections;
    found["parked"] = counters.parked;
    found["checksum_s"] = counters.checksum_s;
    return found;
}

nb::dict to_dict(const SenderCounters& counters) {
    nb::dict found;
    found["records"] = counters.records;
    found["bytes"] = counters.bytes;
    found["sends"] = counters.sends;
    found["queued"] = counters.queued;
    found["queued_bytes"] = counters.queued_bytes;
    found["checksum_s"] = counters.checksum_s;
    found["blocked_s"] = counters.blocked_s;
    return found;
}

void translate(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const std::system_error& reason) {
        const nb::object error =
            nb::steal(PyObject_CallFunction(PyExc_OSError, "is", reason.code().value(), reason.what()));
        if (error.is_valid()) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    }
}

void bind_receiver(nb::module_& module) {
    nb::class_<ReceiverEvent>(module, "ReceiverEvent")
        .def_prop_ro("kind", [](const ReceiverEvent& self) { return kind_name(self.kind); })
        .def_ro("connection", &ReceiverEvent::connection)
        .def_ro("rank", &ReceiverEvent::rank)
        .def_ro("bucket", &ReceiverEvent::bucket)
        .def_ro("iteration", &ReceiverEvent::iteration)
        .def_prop_ro("cause", [](const ReceiverEvent& self) { return cause_name(self.cause); })
        .def_ro("errno", &ReceiverEvent::error);

    nb::class_<ReceiverHandle>(module, "Receiver")
        .def(
            "__init__",
            [](ReceiverHandle* self, std::uint64_t job, std::uint32_t epoch, const std::vector<BucketTuple>& buckets,
               const std::vector<std::vector<std::uintptr_t>>& slots, unsigned threads, const std::vector<int>& cpus,
               std::size_t queue, double stall_s, nb::handle owner) {
                const ReceiverOptions options{threads, cpus, queue, stall_s};
                new (self) ReceiverHandle(job, epoch, to_buckets(buckets), slots, options, owner);
            },
            "job"_a, "epoch"_a, "buckets"_a, "slots"_a, nb::kw_only(), "threads"_a = 1, "cpus"_a = std::vector<int>(),
            "queue"_a = 4096, "stall_s"_a = 60.0, "owner"_a.none() = nb::none(), nb::keep_alive<1, 10>())
        .def("add", &Receiver::add, "fd"_a, "rank"_a, nb::call_guard<GilReleased>())
        .def("advance", &Receiver::advance, "first"_a, nb::call_guard<GilReleased>())
        .def("set_first", &Receiver::set_first, "bucket"_a, "first"_a, nb::call_guard<GilReleased>())
        .def("reset", &Receiver::reset, "bucket"_a, nb::call_guard<GilReleased>())
        .def("begin", &Receiver::begin, "epoch"_a, nb::kw_only(), "keep"_a, nb::call_guard<GilReleased>())
        .def(
            "first", [](const ReceiverHandle& self, std::uint32_t bucket) { return self.windows().first(bucket); },
            "bucket"_a)
        .def(
            "complete",
            [](const ReceiverHandle& self, std::uint32_t bucket, std::uint64_t iteration) {
                return self.windows().complete(bucket, iteration);
            },
            "bucket"_a, "iteration"_a)
        .def(
            "missing",
            [](const ReceiverHandle& self, std::uint64_t iteration) { return self.windows().missing(iteration); },
            "iteration"_a)
        .def(
            "poll",
            [](ReceiverHandle& self, double timeout_s, std::size_t most) {
                const GilReleased released;
                return self.poll(most, deadline_after(timeout_s), check_signals);
            },
            "timeout_s"_a, "most"_a = 256)
        .def("counters", [](const ReceiverHandle& self) { return to_dict(self.counters()); })
        .def("refused", &Receiver::refused)
        .def(
            "close", [](ReceiverHandle& self, double timeout_s) { return self.close(deadline_after(timeout_s)); },
            "timeout_s"_a, nb::call_guard<GilReleased>());
}

void bind_sender(nb::module_& module) {
    nb::class_<SenderHandle>(module, "Sender")
        .def(
            "__init__",
            [](SenderHandle* self, int fd, std::uint64_t job, std::uint32_t epoch, std::uint32_t rank,
               const std::string& destination, std::uint64_t pool_bytes, std::size_t queue, std::uint64_t record_bytes,
               double stall_s, int cpu) {
                const GilReleased released;
                const SenderOptions options{destination, pool_bytes, queue, record_bytes, stall_s, cpu};
                new (self) SenderHandle(fd, job, epoch, rank, options);
            },
            "fd"_a, "job"_a, "epoch"_a, "rank"_a, "destination"_a, nb::kw_only(), "pool_bytes"_a = 32 << 20,
            "queue"_a = 4096, "record_bytes"_a = 1 << 20, "stall_s"_a = 60.0, "cpu"_a = -1)
        .def(
            "put",
            [](SenderHandle& self, std::uint64_t iteration, std::uint32_t bucket, std::uint8_t dtype,
               std::uint64_t offset, std::uintptr_t address, std::uint64_t nbytes, bool borrowed, double timeout_s,
               bool final) {
                Record record;
                record.flags = final ? kFinal : 0;
                record.iteration = iteration;
                record.bucket = bucket;
                record.dtype = dtype;
                record.offset = offset;
                const GilReleased released;
                return self.put(record, reinterpret_cast<const void*>(address), nbytes, borrowed,
                                deadline_after(timeout_s), check_signals);
            },
            "iteration"_a, "bucket"_a, "dtype"_a, "offset"_a, "address"_a, "nbytes"_a, nb::kw_only(), "borrowed"_a,
            "timeout_s"_a, "final"_a = true)
        .def(
            "end",
            [](SenderHandle& self, std::uint64_t iteration, double timeout_s) {
                Record record;
                record.kind = RecordKind::end;
                record.iteration = iteration;
                const GilReleased released;
                return self.put(record, nullptr, 0, false, deadline_after(timeout_s), check_signals);
            },
            "iteration"_a, nb::kw_only(), "timeout_s"_a)
        .def("returned", &Sender::returned, "ticket"_a)
        .def(
            "wait_returned",
            [](SenderHandle& self, std::uint64_t ticket, double timeout_s) {
                return self.wait_returned(ticket, deadline_after(timeout_s), check_signals);
            },
            "ticket"_a, "timeout_s"_a, nb::call_guard<GilReleased>())
        .def_prop_ro("last_ticket", &Sender::last_ticket)
        .def_prop_ro("errno", &Sender::error)
        .def("counters", [](const SenderHandle& self) { return to_dict(self.counters()); })
        .def(
            "close",
            [](SenderHandle& self, double timeout_s) { return self.close(deadline_after(timeout_s), check_signals); },
            "timeout_s"_a, nb::call_guard<GilReleased>())
        .def("abort", &Sender::abort, nb::call_guard<GilReleased>())
        .def(
            "join", [](SenderHandle& self, double timeout_s) { return self.join(deadline_after(timeout_s)); },
            "timeout_s"_a, nb::call_guard<GilReleased>());
}

}  // namespace

void bind_wire(nb::module_& module) {
    nb::register_exception_translator(translate);
    bind_receiver(module);
    bind_sender(module);
}

}  // namespace lastgood
