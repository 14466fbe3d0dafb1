#include "shm_group.h"

#include <fcntl.h>
#include <immintrin.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>

namespace pd {

namespace {

constexpr int64_t LINE = 64;
constexpr int64_t SLICE_NS = 50'000'000;   // asleep at most this long before looking whether the peer lives
constexpr int64_t SPIN_NS = 30'000;        // a futex wake costs 5 to 50 us: spin for about as long, if there are cores
constexpr int NUM_YIELDS = 4;              // then let whoever shares the core run
constexpr int64_t SMALL_BYTES = 32 << 10;  // below: everyone sums everything, and one meeting is saved

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

std::string words(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

int64_t rounded_up(int64_t nbytes) { return (nbytes + 4095) / 4096 * 4096; }

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

}  // namespace

// One line a rank, at the region's start.
struct alignas(LINE) ShmGroup::Header {
  std::atomic<uint32_t> met;       // how many meetings this rank has come to
  std::atomic<uint32_t> sleepers;  // how many wait for it
  std::atomic<int32_t> pid;        // 0: not yet here
  std::atomic<uint32_t> has_left;
};

int make_region(int size, int64_t slot_bytes) {
  const int fd = static_cast<int>(syscall(SYS_memfd_create, "pd-group", 1u /* MFD_CLOEXEC */));
  if (fd < 0) throw GroupBroken(words("memfd_create"));
  if (ftruncate(fd, rounded_up(size * LINE) + 2 * size * rounded_up(slot_bytes)) != 0) {
    ::close(fd);
    throw GroupBroken(words("ftruncate"));
  }
  return fd;
}

ShmGroup::ShmGroup(int rank, int size, int fd, int64_t slot_bytes, double deadline_s)
    : rank_(rank), size_(size), slot_bytes_(rounded_up(slot_bytes)), deadline_s_(deadline_s),
      may_spin_(sysconf(_SC_NPROCESSORS_ONLN) >= size),
      region_bytes_(rounded_up(size * LINE) + 2 * size * slot_bytes_), watches_(size, -1) {
  static_assert(sizeof(Header) == LINE && std::atomic<uint32_t>::is_always_lock_free);
  void* region = mmap(nullptr, region_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const std::string failure = region == MAP_FAILED ? words("mmap") : "";
  ::close(fd);
  if (!failure.empty()) throw GroupBroken(failure);
  region_ = static_cast<char*>(region);
  reinterpret_cast<Header*>(region_)[rank_].pid.store(getpid());
}

ShmGroup::~ShmGroup() { close(); }

void ShmGroup::close() {
  if (!region_) return;
  Header& mine = reinterpret_cast<Header*>(region_)[rank_];
  mine.has_left.store(1);
  futex(&mine.met, FUTEX_WAKE, INT_MAX, nullptr);
  munmap(region_, region_bytes_);
  region_ = nullptr;
  for (int& watch : watches_) {
    if (watch >= 0) ::close(watch);
    watch = -1;
  }
}

char* ShmGroup::slot(int rank) const {
  return region_ + rounded_up(size_ * LINE) + (2 * rank + parity_) * slot_bytes_;
}

// ---- meeting --------------------------------------------------------------------------------------------------------

void ShmGroup::meet(const Interrupt& interrupt) {
  Header* headers = reinterpret_cast<Header*>(region_);
  ++meeting_;
  headers[rank_].met.store(meeting_);  // sequentially consistent, as `sleepers`: one of the two sides sees the other
  if (headers[rank_].sleepers.load() != 0) futex(&headers[rank_].met, FUTEX_WAKE, INT_MAX, nullptr);
  for (int i = 1; i < size_; ++i) wait_for((rank_ + i) % size_, meeting_, interrupt);
}

void ShmGroup::wait_for(int rank, uint32_t meeting, const Interrupt& interrupt) {
  Header& theirs = reinterpret_cast<Header*>(region_)[rank];
  const auto is_there = [&] { return static_cast<int32_t>(theirs.met.load(std::memory_order_acquire) - meeting) >= 0; };
  if (is_there()) return;
  const int64_t start = now_ns();
  if (may_spin_)
    while (now_ns() - start < SPIN_NS)
      for (int i = 0; i < 32; ++i) {
        if (is_there()) return;
        _mm_pause();
      }
  for (int i = 0; i < NUM_YIELDS; ++i) {
    sched_yield();
    if (is_there()) return;
  }
  while (true) {
    theirs.sleepers.fetch_add(1);
    const uint32_t seen = theirs.met.load();
    if (static_cast<int32_t>(seen - meeting) < 0) {
      const timespec slice = {0, SLICE_NS};
      futex(&theirs.met, FUTEX_WAIT, seen, &slice);
    }
    theirs.sleepers.fetch_sub(1);
    if (is_there()) return;
    check_alive(rank);
    if (is_there()) return;  // it came, and left or died afterwards: what it brought is whole
    if (now_ns() - start > static_cast<int64_t>(deadline_s_ * 1e9))
      throw GroupBroken("rank " + std::to_string(rank) + " (pid " + std::to_string(theirs.pid.load()) +
                        ") did not come to a collective in " + std::to_string(static_cast<int>(deadline_s_)) + " s");
    interrupt();
  }
}

void ShmGroup::check_alive(int rank) {
  Header& theirs = reinterpret_cast<Header*>(region_)[rank];
  const auto is_missing = [&] { return static_cast<int32_t>(theirs.met.load() - meeting_) < 0; };
  if (theirs.has_left.load() && is_missing()) throw GroupBroken("rank " + std::to_string(rank) + " has left the group");
  const int pid = theirs.pid.load();
  if (pid == 0) return;  // not yet here: the deadline speaks
  if (watches_[rank] < 0) watches_[rank] = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  bool is_dead;
  if (watches_[rank] >= 0) {
    pollfd exit = {watches_[rank], POLLIN, 0};
    is_dead = poll(&exit, 1, 0) == 1;
  } else {
    is_dead = kill(pid, 0) != 0 && errno == ESRCH;
  }
  if (is_dead && is_missing())
    throw GroupBroken("rank " + std::to_string(rank) + " (pid " + std::to_string(pid) + ") died");
}

// ---- collectives ----------------------------------------------------------------------------------------------------

template <class Body> void ShmGroup::in_pieces(int64_t nbytes, int64_t item_bytes, Body body) const {
  if (!region_) throw GroupBroken("this rank has left its group");
  const int64_t most = slot_bytes_ / item_bytes * item_bytes;
  for (int64_t at = 0; at < nbytes; at += most) body(at, std::min(most, nbytes - at));
}

void ShmGroup::all_reduce(void* data, int64_t count, int64_t item_bytes, AddUp add_up, const Interrupt& interrupt) {
  in_pieces(count * item_bytes, item_bytes, [&](int64_t at, int64_t nbytes) {
    char* piece = static_cast<char*>(data) + at;
    turn();
    std::memcpy(slot(rank_), piece, nbytes);
    meet(interrupt);
    std::vector<const void*> sources(size_);
    const auto add_up_part = [&](int64_t from, int64_t to, char* out) {
      for (int r = 0; r < size_; ++r) sources[r] = slot(r) + from;
      add_up(sources.data(), size_, (to - from) / item_bytes, out);
    };
    if (nbytes <= SMALL_BYTES) return add_up_part(0, nbytes, piece);
    // Each rank sums one part, into its own slot, and all copy all parts: less work from the second rank on.
    const int64_t lines = (nbytes + LINE - 1) / LINE;
    const auto border = [&](int r) { return std::min(nbytes, lines * r / size_ * LINE); };
    add_up_part(border(rank_), border(rank_ + 1), slot(rank_) + border(rank_));
    meet(interrupt);
    for (int r = 0; r < size_; ++r) std::memcpy(piece + border(r), slot(r) + border(r), border(r + 1) - border(r));
  });
}

void ShmGroup::gather(const void* data, int64_t nbytes, void* on_first, const Interrupt& interrupt) {
  in_pieces(nbytes, 1, [&](int64_t at, int64_t piece) {
    turn();
    if (rank_ != 0) std::memcpy(slot(rank_), static_cast<const char*>(data) + at, piece);
    meet(interrupt);
    if (rank_ != 0) return;
    std::memcpy(static_cast<char*>(on_first) + at, static_cast<const char*>(data) + at, piece);
    for (int r = 1; r < size_; ++r) std::memcpy(static_cast<char*>(on_first) + r * nbytes + at, slot(r), piece);
  });
}

void ShmGroup::broadcast(void* data, int64_t nbytes, const Interrupt& interrupt) {
  in_pieces(nbytes, 1, [&](int64_t at, int64_t piece) {
    turn();
    if (rank_ == 0) std::memcpy(slot(0), static_cast<char*>(data) + at, piece);
    meet(interrupt);
    if (rank_ != 0) std::memcpy(static_cast<char*>(data) + at, slot(0), piece);
  });
}

}  // namespace pd
