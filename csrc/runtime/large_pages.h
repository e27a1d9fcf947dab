// Memory in large pages, for what is read from end to end: in a virtual machine a core reads twice as
// fast from pages of 2 MiB as from pages of 4 KiB, whose tables it walks meanwhile.
#pragma once

#include <cstddef>
#include <memory>

namespace vlora::runtime {

// At least `bytes`, on a cache line, from regions that the system is asked to back with large pages
// (where it does not, they are ordinary). Pieces of many owners share a region; it is given back when
// the last of them is gone. Throws std::bad_alloc. Safe from any thread.
std::shared_ptr<char> in_large_pages(size_t bytes);

// Bytes of all regions now, and of the pieces in them: for tests.
struct LargePages {
  size_t regions, pieces;
};
LargePages large_pages();

}  // namespace vlora::runtime
