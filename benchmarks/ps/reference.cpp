// What the kernels of ps/ are measured against: one flat table in C++, with prefetch, doing the same work on the same
// keys: lookup and copy of rows, noting how often and when each was used; refusing damaged gradients as a whole, lookup,
// summing the gradients of repeated keys, Adagrad, noting that the row has changed. No shards, no locks, no growth, no repeated pushes to be told apart.
// Compiled by benchmarks/ps/kernels.py with -O3 -march=native -fno-math-errno.

#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace {

constexpr int64_t kAhead = 24;

// Rows asked for ahead of their use: about as many lines of memory as a core fetches at a time.
template <int64_t dim>
constexpr int64_t kNear = dim > 32 ? 4 : 10;

struct Entry {
  int64_t key;
  int64_t slot;  // plus one; 0: empty
};

struct Stamp {
  uint32_t push;
  uint32_t place;
};

// At the head of a row; its weights follow.
struct Uses {
  uint32_t frequency, updates, seen, changed;
};

struct Table {
  int64_t dim = 0, rows = 0, capacity = 0;
  uint32_t pushes = 0;
  Entry* entries = nullptr;
  Stamp* stamps = nullptr;
  char* heads = nullptr;
  float* block = nullptr;
  float* state = nullptr;  // in the block
  int64_t* slots = nullptr;
  int64_t* unique = nullptr;
  float* sums = nullptr;
};

template <typename T>
T* Room(int64_t count, bool huge) {
  size_t size = ((count * sizeof(T) >> 21) + 1) << 21;
  void* found = aligned_alloc(1 << 21, size);
  if (huge) madvise(found, size, MADV_HUGEPAGE);
  memset(found, 0, size);
  return static_cast<T*>(found);
}

inline uint64_t Mix(uint64_t z) {
  z += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

inline int64_t Find(const Table& t, int64_t key) {
  for (uint64_t at = Mix(key) & (t.capacity - 1);; at = (at + 1) & (t.capacity - 1)) {
    const Entry& entry = t.entries[at];
    if (!entry.slot || entry.key == key) return entry.slot - 1;
  }
}

void Slots(const Table& t, int64_t count, const int64_t* keys) {
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(&t.entries[Mix(keys[i + kAhead]) & (t.capacity - 1)]);
    t.slots[i] = Find(t, keys[i]);
  }
}

template <int64_t dim>
constexpr int64_t kStride = sizeof(Uses) + dim * sizeof(float);

template <int64_t dim>
inline void Soon(const Table& t, int64_t slot) {
  const char* row = t.heads + slot * kStride<dim>;
  for (auto line = reinterpret_cast<uintptr_t>(row) & ~63ull; line < reinterpret_cast<uintptr_t>(row + kStride<dim>);
       line += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(line), 1);
}

template <int64_t dim>
inline float* Weights(const Table& t, int64_t slot) {
  return reinterpret_cast<float*>(t.heads + slot * kStride<dim> + sizeof(Uses));
}

template <int64_t dim>
inline Uses& Head(const Table& t, int64_t slot) {
  return *reinterpret_cast<Uses*>(t.heads + slot * kStride<dim>);
}

template <int64_t dim>
void Rows(const Table& t, int64_t count, float* out, uint32_t step) {
  for (int64_t i = 0; i < count; ++i) {
    if (i + kNear<dim> < count) Soon<dim>(t, t.slots[i + kNear<dim>]);
    Uses& uses = Head<dim>(t, t.slots[i]);
    uses.frequency += uses.frequency != ~0u;
    uses.seen = step;
    memcpy(out + i * dim, Weights<dim>(t, t.slots[i]), dim * sizeof(float));
  }
}

// Whether a value is NaN or infinite: all bits of its exponent are set.
bool Damaged(int64_t count, const float* values) {
  uint32_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    memcpy(&bits, values + i, sizeof bits);
    found |= (bits & 0x7F800000u) == 0x7F800000u;
  }
  return found;
}

template <int64_t dim>
int64_t Sum(Table& t, int64_t count, const float* grads) {
  int64_t found = 0;
  ++t.pushes;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kNear<dim> < count) __builtin_prefetch(&t.stamps[t.slots[i + kNear<dim>]], 1);
    Stamp& stamp = t.stamps[t.slots[i]];
    if (stamp.push != t.pushes) {
      stamp = {t.pushes, static_cast<uint32_t>(found)};
      t.unique[found] = t.slots[i];
      memcpy(t.sums + found * dim, grads + i * dim, dim * sizeof(float));
      ++found;
    } else {
      float* __restrict sum = t.sums + int64_t{stamp.place} * dim;
      const float* __restrict grad = grads + i * dim;
      for (int64_t j = 0; j < dim; ++j) sum[j] += grad[j];
    }
  }
  return found;
}

template <int64_t dim>
void Adagrad(Table& t, int64_t count, float lr, float eps, uint32_t step) {
  for (int64_t i = 0; i < count; ++i) {
    if (i + kNear<dim> < count) {
      Soon<dim>(t, t.unique[i + kNear<dim>]);
      for (int64_t j = 0; j < dim; j += 16) __builtin_prefetch(t.state + t.unique[i + kNear<dim>] * dim + j, 1);
    }
    Uses& uses = Head<dim>(t, t.unique[i]);
    uses.updates += uses.updates != ~0u;
    uses.seen = step;
    uses.changed = t.pushes;
    float* __restrict weight = Weights<dim>(t, t.unique[i]);
    float* __restrict total = t.state + t.unique[i] * dim;
    const float* __restrict grad = t.sums + i * dim;
    for (int64_t j = 0; j < dim; ++j) {
      total[j] += grad[j] * grad[j];
      weight[j] -= lr * grad[j] / (std::sqrt(total[j]) + eps);
    }
  }
}

}  // namespace

extern "C" {

// A table of these keys (different ones); weights are zero. batch: the most keys in a call.
void* table_make(int64_t dim, int64_t rows, const int64_t* keys, int64_t batch, int huge) {
  auto* t = new Table;
  t->dim = dim, t->rows = rows, t->capacity = 1;
  while (t->capacity * 0.6 < rows) t->capacity *= 2;
  t->entries = Room<Entry>(t->capacity, huge);
  t->stamps = Room<Stamp>(rows, huge);
  t->heads = Room<char>(rows * (dim == 16 ? kStride<16> : kStride<64>), huge);
  // Not at the same place in its pages as the weights, which would make loads wait for unrelated stores.
  t->block = Room<float>(rows * dim + 4096, huge);
  t->state = t->block + 592;
  t->slots = Room<int64_t>(batch, huge), t->unique = Room<int64_t>(batch, huge);
  t->sums = Room<float>(batch * dim, huge);
  for (int64_t i = 0; i < rows; ++i) {
    uint64_t at = Mix(keys[i]) & (t->capacity - 1);
    while (t->entries[at].slot) at = (at + 1) & (t->capacity - 1);
    t->entries[at] = {keys[i], i + 1};
  }
  return t;
}

void table_pull(void* table, int64_t count, const int64_t* keys, float* out, uint32_t step) {
  auto& t = *static_cast<Table*>(table);
  Slots(t, count, keys);
  t.dim == 16 ? Rows<16>(t, count, out, step) : Rows<64>(t, count, out, step);
}

void table_push(void* table, int64_t count, const int64_t* keys, const float* grads, float lr, float eps,
                uint32_t step) {
  auto& t = *static_cast<Table*>(table);
  if (Damaged(count * t.dim, grads)) abort();
  Slots(t, count, keys);
  if (t.dim == 16)
    Adagrad<16>(t, Sum<16>(t, count, grads), lr, eps, step);
  else
    Adagrad<64>(t, Sum<64>(t, count, grads), lr, eps, step);
}

void table_free(void* table) {
  auto* t = static_cast<Table*>(table);
  for (void* one : {(void*)t->entries, (void*)t->stamps, (void*)t->heads, (void*)t->block, (void*)t->slots,
                    (void*)t->unique, (void*)t->sums})
    free(one);
  delete t;
}

}  // extern "C"
