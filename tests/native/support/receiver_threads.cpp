// Receiver and senders under the thread sanitizer (test_thread_sanitizer.py): many connections, floating and placed
// windows that move while payloads come, resets, new lives, a queue that is full, connections that break.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "wire/receiver.hpp"
#include "wire/sender.hpp"

namespace {

using namespace lastgood;

constexpr std::uint64_t kJob = 77;
constexpr std::uint64_t kBucketBytes[] = {1 << 20, 300'000, 4096, 64};
constexpr std::size_t kSlots = 2;
constexpr unsigned kRanks = 4;

void check(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

std::byte value(std::uint64_t iteration, std::uint64_t bucket, std::uint64_t at) {
    return std::byte(iteration * 31 + bucket * 7 + at % 251);
}

// Both ends of a TCP connection over loopback.
std::pair<int, int> connect_pair() {
    const int server = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    check(bind(server, reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(server, 1) == 0, "listen");
    getsockname(server, reinterpret_cast<sockaddr*>(&address), &length);
    const int near = socket(AF_INET, SOCK_STREAM, 0);
    check(connect(near, reinterpret_cast<sockaddr*>(&address), length) == 0, "connect");
    const int far = accept(server, nullptr, nullptr);
    check(far >= 0, "accept");
    close(server);
    return {near, far};
}

// All iterations of one rank: its share of each bucket, some records twice.
void send_all(Sender& sender, unsigned rank, std::uint64_t first, std::uint64_t last) {
    std::vector<std::byte> content;
    for (std::uint64_t iteration = first; iteration <= last; ++iteration) {
        for (std::uint32_t bucket = 0; bucket < 4; ++bucket) {
            const std::uint64_t share = kBucketBytes[bucket] / kRanks / 4 * 4;
            const std::uint64_t begin = rank * share;
            const std::uint64_t end = rank + 1 == kRanks ? kBucketBytes[bucket] : begin + share;
            content.resize(end - begin);
            for (std::uint64_t at = begin; at < end; ++at) content[at - begin] = value(iteration, bucket, at);
            Record record;
            record.flags = kFinal;
            record.iteration = iteration;
            record.bucket = bucket;
            record.offset = begin;
            for (int times = 0; times < (bucket == 2 ? 2 : 1); ++times)
                check(sender.put(record, content.data(), content.size(), times == 1, deadline_after(60), {}) != 0,
                      "put: no room");
            check(sender.wait_returned(sender.last_ticket(), deadline_after(60), {}), "wait_returned");
        }
        Record end;
        end.kind = RecordKind::end;
        end.iteration = iteration;
        check(sender.put(end, nullptr, 0, false, deadline_after(60), {}) != 0, "end: no room");
    }
}

struct Training {
    explicit Training(Receiver& receiver, std::uint32_t epoch, std::uint64_t first, std::uint64_t last) {
        for (unsigned rank = 0; rank < kRanks; ++rank) {
            const auto [near, far] = connect_pair();
            receiver.add(far, rank);
            close(far);
            SenderOptions options;
            options.destination = "receiver";
            options.record_bytes = 64 << 10;
            senders.push_back(std::make_unique<Sender>(near, kJob, epoch, rank, options));
            close(near);
        }
        for (unsigned rank = 0; rank < kRanks; ++rank)
            threads.emplace_back([this, rank, first, last] {
                try {
                    send_all(*senders[rank], rank, first, last);
                } catch (const std::exception&) {
                    broken.store(true);
                }
            });
    }
    void join() {
        for (std::thread& thread : threads) thread.join();
    }
    std::vector<std::unique_ptr<Sender>> senders;
    std::vector<std::thread> threads;
    std::atomic<bool> broken{false};
};

}  // namespace

int main() {
    std::vector<DeclaredBucket> buckets;
    std::vector<std::vector<std::vector<std::byte>>> memory(kSlots);
    std::vector<std::vector<std::uintptr_t>> slots(kSlots);
    for (std::uint32_t index = 0; index < 4; ++index) buckets.push_back({index, kBucketBytes[index], 1});
    for (std::size_t slot = 0; slot < kSlots; ++slot)
        for (const DeclaredBucket& bucket : buckets) memory[slot].emplace_back(bucket.nbytes);
    for (std::size_t slot = 0; slot < kSlots; ++slot)
        for (auto& bytes : memory[slot]) slots[slot].push_back(reinterpret_cast<std::uintptr_t>(bytes.data()));
    ReceiverOptions options;
    options.threads = 3;
    options.queue = 4;
    Receiver receiver(kJob, 1, buckets, slots, options);

    // Placed windows: every byte is looked at, without a lock, when its bucket is complete.
    for (std::uint32_t index = 0; index < 4; ++index) check(receiver.set_first(index, 1), "set_first");
    {
        Training training(receiver, 1, 1, 12);
        std::multiset<std::uint64_t> complete;
        for (std::uint64_t iteration = 1; iteration <= 12; ++iteration) {
            while (complete.count(iteration) < 4) {
                const auto events = receiver.poll(8, deadline_after(60), {});
                check(!events.empty(), "no event for 60 s");
                for (const ReceiverEvent& event : events)
                    if (event.kind == ReceiverEvent::Kind::complete) complete.insert(event.iteration);
            }
            for (std::uint32_t bucket = 0; bucket < 4; ++bucket)
                for (std::uint64_t at = 0; at < kBucketBytes[bucket]; ++at)
                    check(memory[iteration % kSlots][bucket][at] == value(iteration, bucket, at), "a wrong byte");
            receiver.advance(iteration + 1);
        }
        std::atomic<bool> done{false};
        std::thread poller([&] {
            while (!done.load()) receiver.poll(8, deadline_after(0.01), {});
        });
        training.join();
        done.store(true);
        poller.join();
        check(!training.broken.load(), "a sender failed");
    }
    // Windows that float, are placed, let go and advanced, and new lives, while payloads come.
    std::mt19937 random(5);
    for (std::uint32_t life = 2; life < 6; ++life) {
        receiver.begin(life, life % 2 == 0);
        if (life % 2 == 0) receiver.begin(life, false);
        Training training(receiver, life, 1, 40);
        for (int step = 0; step < 200; ++step) {
            const auto bucket = std::uint32_t(random() % 4);
            switch (random() % 5) {
                case 0:
                    receiver.reset(bucket);
                    break;
                case 1:
                    receiver.set_first(bucket, receiver.windows().first(bucket).value_or(1) + random() % 2);
                    break;
                case 2:
                    receiver.advance(receiver.windows().first(bucket).value_or(1));
                    break;
                case 3:
                    receiver.windows().missing(receiver.windows().first(bucket).value_or(1));
                    break;
                default:
                    receiver.poll(4, deadline_after(0.002), {});
            }
        }
        receiver.begin(life, true);
        if (life == 3) training.senders[0]->abort();
        while (!receiver.poll(8, deadline_after(0.2), {}).empty()) continue;
        training.join();
    }
    check(receiver.close(deadline_after(60)), "close");
    std::puts("done");
}
