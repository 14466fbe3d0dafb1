// Collectives of the processes of one host through one shared region. Knows bytes; knows neither torch nor Python.
//
// Each rank has two slots in the region, used in turn. A collective is: copy into your slot, meet, read the others'.
// One meeting is enough: a slot is written again two collectives later, and to get there every rank has met once more,
// which it does only after it has read.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace pd {

struct GroupBroken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Makes the region. It lives as long as a process maps it or holds the descriptor: nothing is left after a kill.
int make_region(int size, int64_t slot_bytes);

class ShmGroup {
 public:
  using AddUp = void (*)(const void* const* sources, int num_sources, int64_t count, void* out);
  // Called some ten times a second while waiting; may throw.
  using Interrupt = std::function<void()>;

  ShmGroup(int rank, int size, int fd, int64_t slot_bytes, double deadline_s);  // takes the descriptor
  ~ShmGroup();
  ShmGroup(const ShmGroup&) = delete;
  ShmGroup& operator=(const ShmGroup&) = delete;

  void all_reduce(void* data, int64_t count, int64_t item_bytes, AddUp add_up, const Interrupt& interrupt);
  void gather(const void* data, int64_t nbytes, void* on_first, const Interrupt& interrupt);  // [size][nbytes]
  void broadcast(void* data, int64_t nbytes, const Interrupt& interrupt);
  void close();

  int rank() const { return rank_; }
  int size() const { return size_; }

 private:
  struct Header;
  char* slot(int rank) const;
  void turn() { parity_ ^= 1; }
  void meet(const Interrupt& interrupt);
  void wait_for(int rank, uint32_t meeting, const Interrupt& interrupt);
  void check_alive(int rank);
  template <class Body> void in_pieces(int64_t nbytes, int64_t item_bytes, Body body) const;

  int rank_, size_;
  int64_t slot_bytes_;
  double deadline_s_;
  bool may_spin_;  // a core for each rank
  int64_t region_bytes_;
  char* region_ = nullptr;
  uint32_t meeting_ = 0;
  int parity_ = 0;
  std::vector<int> watches_;  // a pidfd of each peer, once known; -1 before
};

}  // namespace pd
