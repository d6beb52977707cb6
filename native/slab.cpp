// Keeps large blocks of memory that were freed, for the next tensors of their size.
//
// torch asks the C library for every tensor, and the library hands large ones back to the system as soon as
// they are freed: the next one's pages must be cleared again. Loaded before the C library (LD_PRELOAD), this
// stands in for what torch calls.
//
// A limit covers what is in use and what is kept together: to stay below it, what was freed first goes back
// to the system first. It starts at 0, where nothing is kept.
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <pthread.h>
#include <sys/mman.h>
#include <features.h>

#if defined(__GLIBC__)
#include <dlfcn.h>

extern "C" {
void *__libc_memalign(std::size_t alignment, std::size_t bytes);
void *__libc_malloc(std::size_t bytes);
void *__libc_realloc(void *block, std::size_t bytes);
void __libc_free(void *block);
}

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kLarge = std::size_t(1) << 20;   // smaller blocks are the C library's
constexpr std::size_t kAlignment = std::size_t(2) << 20;  // of a huge page; tells our blocks from most others
constexpr std::size_t kMost = 4096;

struct Block {
    void *at;
    std::size_t bytes;
    std::uint64_t freed;  // a count that grows with every free; 0 for a block in use
};

Block blocks[kMost];
std::size_t count = 0, held = 0, limit = 0;
std::uint64_t frees = 0;
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

class Locked {
  public:
    Locked() { pthread_mutex_lock(&mutex); }
    ~Locked() { pthread_mutex_unlock(&mutex); }
};

Block *find(void *at) {
    if (reinterpret_cast<std::uintptr_t>(at) % kAlignment) return nullptr;
    for (std::size_t i = 0; i < count; ++i)
        if (blocks[i].at == at) return &blocks[i];
    return nullptr;
}

void give_back(Block *block) {
    munmap(block->at, block->bytes);
    held -= block->bytes;
    *block = blocks[--count];
}

// Until `more` fits beside what is held, or only blocks in use are left.
void make_room(std::size_t more) {
    while (held + more > limit) {
        Block *oldest = nullptr;
        for (std::size_t i = 0; i < count; ++i)
            if (blocks[i].freed && (!oldest || blocks[i].freed < oldest->freed)) oldest = &blocks[i];
        if (!oldest) return;
        give_back(oldest);
    }
}

void *map(std::size_t bytes) {
    void *found = mmap(nullptr, bytes + kAlignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) return nullptr;
    const auto start = reinterpret_cast<std::uintptr_t>(found);
    const auto at = (start + kAlignment - 1) / kAlignment * kAlignment;
    if (at > start) munmap(found, at - start);
    munmap(reinterpret_cast<void *>(at + bytes), start + kAlignment - at);
    void *block = reinterpret_cast<void *>(at);
    if (bytes >= kAlignment) madvise(block, bytes, MADV_HUGEPAGE);
    return block;
}

// A kept block that is at most an eighth too large, or a new one.
void *take(std::size_t bytes) {
    Locked locked;
    Block *best = nullptr;
    for (std::size_t i = 0; i < count; ++i) {
        Block &block = blocks[i];
        if (block.freed && block.bytes >= bytes && block.bytes <= bytes + bytes / 8 &&
            (!best || block.bytes < best->bytes))
            best = &block;
    }
    if (best) {
        best->freed = 0;
        return best->at;
    }
    make_room(bytes);
    if (count == kMost) return nullptr;
    void *at = map(bytes);
    if (at) {
        blocks[count++] = {at, bytes, 0};
        held += bytes;
    }
    return at;
}

}  // namespace

extern "C" {

int posix_memalign(void **block, std::size_t alignment, std::size_t bytes) {
    if (bytes >= kLarge && alignment <= kAlignment)
        if (void *at = take((bytes + kPage - 1) / kPage * kPage)) {
            *block = at;
            return 0;
        }
    void *at = __libc_memalign(alignment, bytes);
    if (!at) return ENOMEM;
    *block = at;
    return 0;
}

void free(void *block) {
    if (reinterpret_cast<std::uintptr_t>(block) % kAlignment == 0 && block) {
        Locked locked;
        if (Block *ours = find(block)) {
            const int before = errno;  // as the C library's has it
            ours->freed = ++frees;
            make_room(0);
            errno = before;
            return;
        }
    }
    __libc_free(block);
}

std::size_t malloc_usable_size(void *block) {
    {
        Locked locked;
        if (Block *ours = find(block)) return ours->bytes;
    }
    using Size = std::size_t (*)(void *);
    static const Size next = reinterpret_cast<Size>(dlsym(RTLD_NEXT, "malloc_usable_size"));
    return next(block);
}

void *realloc(void *block, std::size_t bytes) {
    std::size_t had = 0;
    {
        Locked locked;
        if (Block *ours = find(block)) had = ours->bytes;
    }
    if (!had) return __libc_realloc(block, bytes);
    void *moved = __libc_malloc(bytes);
    if (moved) {
        std::memcpy(moved, block, had < bytes ? had : bytes);
        free(block);
    }
    return moved;
}

// From now on, keep freed blocks as long as all large blocks together take no more than this.
void plait_slab_limit(std::size_t bytes) {
    Locked locked;
    limit = bytes;
    make_room(0);
}

// Bytes of large blocks, in use or kept.
std::size_t plait_slab_held() {
    Locked locked;
    return held;
}
}
#endif
