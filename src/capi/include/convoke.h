/* The communication runtime of convoke, for C and C++. Link with -lconvoke, or use the table of cvk_api.
 *
 * docs/reference/c.md of the project is the reference, with an example.
 *
 * Made by cbindgen from src/capi: do not edit. */

#ifndef CONVOKE_H
#define CONVOKE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// As `peer` of `CVK_KIND_RECV`: any rank.
#define CVK_ANY_RANK -1

// The version of the table. It changes only if a field changes; new fields are added at the end.
#define CVK_API_VERSION 1

// As `timeout_ms` of `cvk_work_wait`: wait until the operation is done. The operation's own time limit
// holds.
#define CVK_FOREVER UINT64_MAX

// The result of a function. Every value but `CVK_STATUS_OK` and `CVK_STATUS_PENDING` is an error, which
// `cvk_error_message` and `cvk_error_json` describe.
typedef enum cvk_status {
    // The call succeeded.
    CVK_STATUS_OK = 0,
    // The operation is not done yet.
    CVK_STATUS_PENDING = 1,
    // An argument is invalid. Nothing was sent, and the group continues.
    CVK_STATUS_INVALID_ARGUMENT = 2,
    // A rank was lost. The group has ended on all ranks.
    CVK_STATUS_PEER_LOST = 3,
    // A call did not end within its time limit. The group has ended on all ranks.
    CVK_STATUS_TIMEOUT = 4,
    // Two ranks made different calls. The group has ended on all ranks.
    CVK_STATUS_MISMATCH = 5,
    // A rank called `cvk_group_abort`. The group has ended on all ranks.
    CVK_STATUS_ABORTED = 6,
    // A rank has no file descriptor or no shared memory left. The group has ended on all ranks.
    CVK_STATUS_EXHAUSTED = 7,
    // A connected rank sent an invalid frame. The group has ended on all ranks.
    CVK_STATUS_PROTOCOL = 8,
    // A message was longer than the buffer of its receive. The group continues.
    CVK_STATUS_TRUNCATED = 9,
    // A connection could not prove that it belongs to this job.
    CVK_STATUS_UNAUTHORIZED = 10,
    // The group did not form.
    CVK_STATUS_BOOTSTRAP = 11,
    // This process has joined, or is joining, this world already.
    CVK_STATUS_ALREADY_JOINED = 12,
    // This rank has destroyed the group.
    CVK_STATUS_DESTROYED = 13,
    // The ranks that survived a failure have continued without this rank.
    CVK_STATUS_EXCLUDED = 14,
    // This build or platform does not support the operation.
    CVK_STATUS_UNSUPPORTED = 15,
    // The operating system refused an operation.
    CVK_STATUS_SYSTEM = 16,
    // The environment variables, URL, token or agent channel of this process cannot be used.
    CVK_STATUS_ENVIRONMENT = 17,
    // The store failed.
    CVK_STATUS_STORE = 18,
    // A fault of this library, which its authors want to know of.
    CVK_STATUS_INTERNAL = 19,
} cvk_status;

// The type of an element.
typedef enum cvk_type {
    // `int8_t`
    CVK_TYPE_I8 = 0,
    // `uint8_t`
    CVK_TYPE_U8 = 1,
    // `int16_t`
    CVK_TYPE_I16 = 2,
    // `uint16_t`
    CVK_TYPE_U16 = 3,
    // `int32_t`
    CVK_TYPE_I32 = 4,
    // `uint32_t`
    CVK_TYPE_U32 = 5,
    // `int64_t`
    CVK_TYPE_I64 = 6,
    // `uint64_t`
    CVK_TYPE_U64 = 7,
    // `float`
    CVK_TYPE_F32 = 8,
    // `double`
    CVK_TYPE_F64 = 9,
    // IEEE half precision, 2 bytes
    CVK_TYPE_F16 = 10,
    // The upper 16 bits of a `float`
    CVK_TYPE_BF16 = 11,
    // `bool`: one byte, 0 or 1
    CVK_TYPE_BOOL = 12,
    // Two `float`: real and imaginary part
    CVK_TYPE_COMPLEX_F32 = 13,
    // Two `double`: real and imaginary part
    CVK_TYPE_COMPLEX_F64 = 14,
} cvk_type;

// The reduction that combines the ranks' elements.
typedef enum cvk_op {
    // Sum; integers wrap. On bools: or.
    CVK_OP_SUM = 0,
    // Minimum; NaN if an operand is NaN. Not of complex numbers.
    CVK_OP_MIN = 1,
    // Maximum; NaN if an operand is NaN. Not of complex numbers.
    CVK_OP_MAX = 2,
    // Product; integers wrap.
    CVK_OP_PRODUCT = 3,
    // Sum divided by the number of ranks; of floating-point and complex types.
    CVK_OP_AVG = 4,
    // Bitwise AND, of integers and bools.
    CVK_OP_BAND = 5,
    // Bitwise OR, of integers and bools.
    CVK_OP_BOR = 6,
    // Bitwise exclusive OR, of integers and bools.
    CVK_OP_BXOR = 7,
    // Sum, where each rank first multiplies its elements by its own `factor`.
    CVK_OP_PREMUL_SUM = 8,
    // The function `reduce` of the call.
    CVK_OP_CUSTOM = 9,
} cvk_op;

// The kind of an operation. Where both buffers hold elements of this rank, a `send` of `NULL` means in
// place: the operation reads `recv` and writes its result there.
typedef enum cvk_kind {
    // Waits for all ranks.
    CVK_KIND_BARRIER = 0,
    // Reduces `send`, or `recv` in place, into `recv` on all ranks.
    CVK_KIND_ALL_REDUCE = 1,
    // Copies `recv` of rank `peer` to `recv` of all ranks.
    CVK_KIND_BROADCAST = 2,
    // Reduces `send` into `recv` of rank `peer`, or `recv` in place; then `recv` of other ranks is scratch.
    CVK_KIND_REDUCE = 3,
    // Concatenates `send` of all ranks in `recv`. In place: this rank's block of `recv`.
    CVK_KIND_ALL_GATHER = 4,
    // Reduces `send`, and gives each rank its block in `recv`. In place: the result is this rank's block of
    // `recv`.
    CVK_KIND_REDUCE_SCATTER = 5,
    // Concatenates `send` of all ranks in `recv` of rank `peer`.
    CVK_KIND_GATHER = 6,
    // Gives each rank its block of `send` of rank `peer`.
    CVK_KIND_SCATTER = 7,
    // Gives each rank its block of `send` of each rank. In place: of `recv`.
    CVK_KIND_ALL_TO_ALL = 8,
    // As `CVK_KIND_ALL_GATHER`, with a block of `recv_counts[rank]` elements of each rank.
    CVK_KIND_ALL_GATHER_V = 9,
    // As `CVK_KIND_REDUCE_SCATTER`, with a block of `send_counts[rank]` elements for each rank.
    CVK_KIND_REDUCE_SCATTER_V = 10,
    // As `CVK_KIND_GATHER`, with a block of `recv_counts[rank]` elements of each rank. The root passes the
    // counts.
    CVK_KIND_GATHER_V = 11,
    // As `CVK_KIND_SCATTER`, with a block of `send_counts[rank]` elements for each rank. The root passes the
    // counts.
    CVK_KIND_SCATTER_V = 12,
    // As `CVK_KIND_ALL_TO_ALL`, with `send_counts[rank]` elements for, and `recv_counts[rank]` of each rank.
    CVK_KIND_ALL_TO_ALL_V = 13,
    // Replaces `recv` by the reduction of the ranks up to this one.
    CVK_KIND_SCAN = 14,
    // Replaces `recv` by the reduction of the ranks before this one. It is unchanged on rank 0.
    CVK_KIND_EXCLUSIVE_SCAN = 15,
    // Sends `send` to rank `peer` with `tag`.
    CVK_KIND_SEND = 16,
    // Receives a message of rank `peer`, or of any rank if it is `CVK_ANY_RANK`, with `tag` into `recv`.
    CVK_KIND_RECV = 17,
} cvk_kind;

// A handle of a process group. Any number of threads may use it at a time.
typedef struct cvk_group cvk_group;

// Memory of this rank that the other ranks of its host can access.
typedef struct cvk_memory cvk_memory;

// A store server with the protocol of torch's TCPStore. It runs in a thread of this process.
typedef struct cvk_store cvk_store;

// An operation in progress. Any number of threads may wait for it.
typedef struct cvk_work cvk_work;

// Source, tag and length of a received message.
typedef struct cvk_message {
    // The rank that sent the message.
    size_t source;
    // The tag of the message.
    uint32_t tag;
    // Number of elements of the message.
    size_t count;
} cvk_message;

// The way to join a world. Set all bytes to 0, then `size`, then what differs from the defaults.
typedef struct cvk_init_options {
    // `sizeof(cvk_init_options)`.
    size_t size;
    // `tcp://host:port`, `file:///path` or `env://`; `NULL` means the environment variables of a launcher,
    // `mpirun` or `srun`, and without any of them a world of one rank.
    const char *url;
    // `host:port` of a store server with the protocol of torch's TCPStore, where the ranks meet; `NULL`
    // means the one of `url`. Needs `rank`, `world_size`, and a `name` that no other group has at that
    // store.
    const char *store;
    // This rank, if `world_size` is not 0.
    size_t rank;
    // Number of ranks; 0 means that the environment or the URL gives it, and this rank.
    size_t world_size;
    // Name of the world in errors and logs; `NULL` means `world`.
    const char *name;
    // Time limit of a call in milliseconds; 0 means 30 minutes. A call that exceeds it ends the group.
    uint64_t timeout_ms;
    // Time limit for forming the group in milliseconds; 0 means 5 minutes.
    uint64_t init_timeout_ms;
    // Time in milliseconds after which a silent host counts as lost; 0 means 10 seconds. It is rounded to
    // whole seconds. Dead processes are found at once.
    uint64_t peer_timeout_ms;
    // Not 0: ranks of one host use TCP connections instead of shared memory.
    uint8_t no_shared_memory;
} cvk_init_options;

// A function that combines elements of two ranks: `into[i] = combine(into[i], from[i])` for `count`
// elements. It runs on any thread, must not call this library, and should be commutative and associative.
typedef void (*cvk_reduce_function)(void *context, void *into, const void *from, size_t count);

// A function that the library calls with the pointer that the program gave.
typedef void (*cvk_callback)(void *context);

// An operation. Set all bytes to 0, then `size` and `kind`, then what the kind needs.
//
// The memory of the buffers must stay valid and unused until the operation is done: until `cvk_run` returns,
// `cvk_work_wait` returns its result, or `on_complete` is called. The lists of counts are copied.
typedef struct cvk_call {
    // `sizeof(cvk_call)`.
    size_t size;
    // A `cvk_kind`.
    uint32_t kind;
    // The `cvk_type` of both buffers.
    uint32_t dtype;
    // The `cvk_op` of a reduction.
    uint32_t reduce_op;
    // The tag of a message.
    uint32_t tag;
    // The root of a collective; the destination or source of a message.
    int64_t peer;
    // The elements that the operation reads, or `NULL`.
    const void *send;
    // The elements that the operation writes, or `NULL`.
    void *recv;
    // Number of elements at `send`.
    size_t send_count;
    // Number of elements at `recv`.
    size_t recv_count;
    // Number of elements of each rank's block at `send`, for kinds that end with V.
    const size_t *send_counts;
    // Number of elements of each rank's block at `recv`, for kinds that end with V.
    const size_t *recv_counts;
    // The factor of `CVK_OP_PREMUL_SUM`: an element, or a `float` for the 16-bit floating-point types.
    const void *factor;
    // The function of `CVK_OP_CUSTOM`.
    cvk_reduce_function reduce;
    // The first argument of `reduce`.
    void *reduce_context;
    // Time limit in milliseconds; 0 means the group's. An operation that exceeds it ends the group.
    uint64_t timeout_ms;
    // Called once when an operation of `cvk_start` is done, successfully or not, and uses the memory no
    // more. It is not called if `cvk_start` fails. It runs on the thread that finds the operation done, and
    // may begin operations, but must not wait for any.
    cvk_callback on_complete;
    // The argument of `on_complete`.
    void *on_complete_context;
} cvk_call;

// A function that returns whether the calling thread must stop waiting.
typedef bool (*cvk_interrupt_check)(void);

// All functions of this header.
//
// Later libraries add fields at the end. A program that was compiled with a newer header checks `size`
// before it uses a field that an older library may lack.
typedef struct cvk_api_table {
    // Number of bytes of the table in this library.
    size_t size;
    // The version of the table.
    uint32_t version;
    const char *(*error_message)(void);
    const char *(*error_json)(void);
    bool (*error_ends_group)(void);
    enum cvk_status (*init)(const struct cvk_init_options *options, struct cvk_group **world);
    size_t (*group_rank)(const struct cvk_group *group);
    size_t (*group_size)(const struct cvk_group *group);
    size_t (*group_local_rank)(const struct cvk_group *group);
    size_t (*group_local_size)(const struct cvk_group *group);
    uint32_t (*group_restart_count)(const struct cvk_group *group);
    const char *(*group_name)(const struct cvk_group *group);
    uint64_t (*group_timeout_ms)(const struct cvk_group *group);
    size_t (*group_global_rank)(const struct cvk_group *group, size_t rank);
    const char *(*group_failure_json)(const struct cvk_group *group);
    enum cvk_status (*group_clone)(const struct cvk_group *group,
                                   uint64_t timeout_ms,
                                   struct cvk_group **new_group);
    enum cvk_status (*group_subgroup)(const struct cvk_group *group,
                                      const size_t *ranks,
                                      size_t count,
                                      const char *name,
                                      struct cvk_group **new_group);
    enum cvk_status (*group_split)(const struct cvk_group *group,
                                   int64_t color,
                                   int64_t key,
                                   struct cvk_group **new_group);
    enum cvk_status (*group_shrink)(const struct cvk_group *group,
                                    uint64_t within_ms,
                                    struct cvk_group **new_group);
    enum cvk_status (*group_abort)(const struct cvk_group *group, const char *reason);
    enum cvk_status (*group_destroy)(const struct cvk_group *group);
    void (*group_free)(struct cvk_group *group);
    enum cvk_status (*barrier)(const struct cvk_group *group);
    enum cvk_status (*broadcast)(const struct cvk_group *group,
                                 void *buffer,
                                 size_t count,
                                 uint32_t dtype,
                                 size_t root);
    enum cvk_status (*all_reduce)(const struct cvk_group *group,
                                  const void *send,
                                  void *recv,
                                  size_t count,
                                  uint32_t dtype,
                                  uint32_t reduce_op);
    enum cvk_status (*reduce)(const struct cvk_group *group,
                              const void *send,
                              void *recv,
                              size_t count,
                              uint32_t dtype,
                              uint32_t reduce_op,
                              size_t root);
    enum cvk_status (*all_gather)(const struct cvk_group *group,
                                  const void *send,
                                  void *recv,
                                  size_t count,
                                  uint32_t dtype);
    enum cvk_status (*reduce_scatter)(const struct cvk_group *group,
                                      const void *send,
                                      void *recv,
                                      size_t count,
                                      uint32_t dtype,
                                      uint32_t reduce_op);
    enum cvk_status (*gather)(const struct cvk_group *group,
                              const void *send,
                              void *recv,
                              size_t count,
                              uint32_t dtype,
                              size_t root);
    enum cvk_status (*scatter)(const struct cvk_group *group,
                               const void *send,
                               void *recv,
                               size_t count,
                               uint32_t dtype,
                               size_t root);
    enum cvk_status (*all_to_all)(const struct cvk_group *group,
                                  const void *send,
                                  void *recv,
                                  size_t count,
                                  uint32_t dtype);
    enum cvk_status (*scan)(const struct cvk_group *group,
                            void *buffer,
                            size_t count,
                            uint32_t dtype,
                            uint32_t reduce_op);
    enum cvk_status (*exclusive_scan)(const struct cvk_group *group,
                                      void *buffer,
                                      size_t count,
                                      uint32_t dtype,
                                      uint32_t reduce_op);
    enum cvk_status (*send)(const struct cvk_group *group,
                            const void *buffer,
                            size_t count,
                            uint32_t dtype,
                            size_t to,
                            uint32_t tag);
    enum cvk_status (*recv)(const struct cvk_group *group,
                            void *buffer,
                            size_t count,
                            uint32_t dtype,
                            int64_t from,
                            uint32_t tag,
                            struct cvk_message *message);
    enum cvk_status (*monitored_barrier)(const struct cvk_group *group, uint64_t timeout_ms);
    enum cvk_status (*run)(const struct cvk_group *group,
                           const struct cvk_call *calls,
                           size_t count,
                           struct cvk_message *messages);
    enum cvk_status (*start)(const struct cvk_group *group,
                             const struct cvk_call *call,
                             struct cvk_work **work);
    enum cvk_status (*work_wait)(const struct cvk_work *work, uint64_t timeout_ms, struct cvk_message *message);
    bool (*work_is_done)(const struct cvk_work *work);
    enum cvk_status (*work_descriptor)(const struct cvk_work *work, int *descriptor);
    enum cvk_status (*work_on_complete)(const struct cvk_work *work, cvk_callback function, void *context);
    void (*work_free)(struct cvk_work *work);
    enum cvk_status (*probe)(const struct cvk_group *group,
                             int64_t source,
                             uint32_t tag,
                             struct cvk_message *message);
    enum cvk_status (*try_probe)(const struct cvk_group *group,
                                 int64_t source,
                                 uint32_t tag,
                                 struct cvk_message *message);
    enum cvk_status (*alloc)(const struct cvk_group *group, size_t bytes, struct cvk_memory **memory);
    void *(*memory_address)(const struct cvk_memory *memory);
    bool (*memory_is_shared)(const struct cvk_memory *memory);
    void (*memory_free)(struct cvk_memory *memory);
    enum cvk_status (*store_serve)(const char *host, uint16_t port, struct cvk_store **store);
    uint16_t (*store_port)(const struct cvk_store *store);
    void (*store_free)(struct cvk_store *store);
    enum cvk_status (*adopt)(const struct cvk_group *group,
                             int descriptor,
                             uint64_t offset,
                             void *address,
                             size_t bytes,
                             struct cvk_memory **memory);
    bool (*is_shared_memory)(const struct cvk_group *group, const void *address, size_t bytes);
    enum cvk_status (*memory_limit_use)(struct cvk_memory *memory, size_t bytes);
    void (*set_interrupt_check)(cvk_interrupt_check check);
} cvk_api_table;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Waits until all ranks have called it.
//
// Requirements:
// `group` is valid or `NULL`.
enum cvk_status cvk_barrier(const struct cvk_group *group);

// Copies `count` elements of rank `root` to all ranks.
//
// Requirements:
// `group` is valid or `NULL`. `buffer` has `count` elements.
enum cvk_status cvk_broadcast(const struct cvk_group *group,
                              void *buffer,
                              size_t count,
                              uint32_t dtype,
                              size_t root);

// Reduces `count` elements of each rank; all ranks get the result in `recv`. `send` may be `NULL`: then it
// reduces `recv` in place.
//
// Requirements:
// `group` is valid or `NULL`. `recv`, and `send` unless it is `NULL`, have `count` elements and do not
// overlap.
enum cvk_status cvk_all_reduce(const struct cvk_group *group,
                               const void *send,
                               void *recv,
                               size_t count,
                               uint32_t dtype,
                               uint32_t reduce_op);

// Reduces `count` elements of each rank; rank `root` gets the result in `recv`. Other ranks may pass `NULL`
// as `recv`. If `send` is `NULL`, it reduces `recv` in place, which is scratch memory on the other ranks.
//
// Requirements:
// `group` is valid or `NULL`. `send` and `recv`, unless they are `NULL`, have `count` elements and do not
// overlap.
enum cvk_status cvk_reduce(const struct cvk_group *group,
                           const void *send,
                           void *recv,
                           size_t count,
                           uint32_t dtype,
                           uint32_t reduce_op,
                           size_t root);

// Concatenates `count` elements of each rank, in the order of ranks, in `recv` of all ranks. If `send` is
// `NULL`, this rank's elements are in their place of `recv` already.
//
// Requirements:
// `group` is valid or `NULL`. `send`, unless it is `NULL`, has `count` elements, `recv` as many times that
// as there are ranks. They do not overlap.
enum cvk_status cvk_all_gather(const struct cvk_group *group,
                               const void *send,
                               void *recv,
                               size_t count,
                               uint32_t dtype);

// Reduces blocks of `count` elements, one for each rank; each rank gets its block in `recv`. If `send` is
// `NULL`, all blocks are in `recv`, and the result replaces this rank's block.
//
// Requirements:
// `group` is valid or `NULL`. `send` has as many times `count` elements as there are ranks, `recv` has
// `count`, or that many if `send` is `NULL`. They do not overlap.
enum cvk_status cvk_reduce_scatter(const struct cvk_group *group,
                                   const void *send,
                                   void *recv,
                                   size_t count,
                                   uint32_t dtype,
                                   uint32_t reduce_op);

// Concatenates `count` elements of each rank in `recv` of rank `root`. Other ranks may pass `NULL` as
// `recv`.
//
// Requirements:
// `group` is valid or `NULL`. `send` has `count` elements, `recv` of the root as many times that as there
// are ranks. They do not overlap.
enum cvk_status cvk_gather(const struct cvk_group *group,
                           const void *send,
                           void *recv,
                           size_t count,
                           uint32_t dtype,
                           size_t root);

// Gives each rank its block of `count` elements of `send` of rank `root`. Other ranks may pass `NULL` as
// `send`.
//
// Requirements:
// `group` is valid or `NULL`. `send` of the root has as many times `count` elements as there are ranks,
// `recv` has `count`. They do not overlap.
enum cvk_status cvk_scatter(const struct cvk_group *group,
                            const void *send,
                            void *recv,
                            size_t count,
                            uint32_t dtype,
                            size_t root);

// Gives each rank its block of `count` elements of `send` of each rank. If `send` is `NULL`, the blocks in
// `recv` are exchanged in place.
//
// Requirements:
// `group` is valid or `NULL`. `recv`, and `send` unless it is `NULL`, have as many times `count` elements as
// there are ranks. They do not overlap.
enum cvk_status cvk_all_to_all(const struct cvk_group *group,
                               const void *send,
                               void *recv,
                               size_t count,
                               uint32_t dtype);

// Replaces the elements by the reduction of the elements of ranks 0 to this one.
//
// Requirements:
// `group` is valid or `NULL`. `buffer` has `count` elements.
enum cvk_status cvk_scan(const struct cvk_group *group,
                         void *buffer,
                         size_t count,
                         uint32_t dtype,
                         uint32_t reduce_op);

// Replaces the elements by the reduction of the elements of the ranks before this one. Those of rank 0 are
// not changed.
//
// Requirements:
// `group` is valid or `NULL`. `buffer` has `count` elements.
enum cvk_status cvk_exclusive_scan(const struct cvk_group *group,
                                   void *buffer,
                                   size_t count,
                                   uint32_t dtype,
                                   uint32_t reduce_op);

// Sends `count` elements to rank `to`. It returns when the program may change them.
//
// Requirements:
// `group` is valid or `NULL`. `buffer` has `count` elements.
enum cvk_status cvk_send(const struct cvk_group *group,
                         const void *buffer,
                         size_t count,
                         uint32_t dtype,
                         size_t to,
                         uint32_t tag);

// Receives a message of rank `from`, or of any rank if it is `CVK_ANY_RANK`, with `tag`. `count` is the room
// in `buffer`; a shorter message is no error. `message` is `NULL`, or gets the source and length of the
// message.
//
// Requirements:
// `group` is valid or `NULL`. `buffer` has `count` elements; `message` is `NULL` or writable.
enum cvk_status cvk_recv(const struct cvk_group *group,
                         void *buffer,
                         size_t count,
                         uint32_t dtype,
                         int64_t from,
                         uint32_t tag,
                         struct cvk_message *message);

// As `cvk_barrier`, but names the ranks that do not come: after `timeout_ms` milliseconds every rank gets
// `CVK_STATUS_TIMEOUT` with the missing ranks.
//
// Requirements:
// `group` is valid or `NULL`.
enum cvk_status cvk_monitored_barrier(const struct cvk_group *group, uint64_t timeout_ms);

// Returns this rank in the group.
//
// Requirements:
// `group` is valid or `NULL`.
size_t cvk_group_rank(const struct cvk_group *group);

// Returns the number of ranks of the group.
//
// Requirements:
// `group` is valid or `NULL`.
size_t cvk_group_size(const struct cvk_group *group);

// Returns the index of this rank among the ranks of the group on this host; for the world, as the launcher
// counts them.
//
// Requirements:
// `group` is valid or `NULL`.
size_t cvk_group_local_rank(const struct cvk_group *group);

// Returns the number of ranks of the group on this host.
//
// Requirements:
// `group` is valid or `NULL`.
size_t cvk_group_local_size(const struct cvk_group *group);

// Returns the number of times that the launcher of this node has restarted its workers; 0 for groups other
// than the world.
//
// Requirements:
// `group` is valid or `NULL`.
uint32_t cvk_group_restart_count(const struct cvk_group *group);

// Returns the name of the group. The text is valid as long as the handle.
//
// Requirements:
// `group` is valid or `NULL`.
const char *cvk_group_name(const struct cvk_group *group);

// Returns the time limit of calls on this handle, in milliseconds.
//
// Requirements:
// `group` is valid or `NULL`.
uint64_t cvk_group_timeout_ms(const struct cvk_group *group);

// Returns the rank in the world of rank `rank` of the group; `SIZE_MAX` if there is no such rank.
//
// Requirements:
// `group` is valid or `NULL`.
size_t cvk_group_global_rank(const struct cvk_group *group, size_t rank);

// Returns the error that ended the group as a JSON object, as `cvk_error_json`; `NULL` if no call of this
// rank has returned it. The text is valid as long as a handle of the group exists.
//
// Requirements:
// `group` is valid or `NULL`.
const char *cvk_group_failure_json(const struct cvk_group *group);

// Makes another handle of the group, with a time limit of calls in milliseconds; 0 keeps the time limit.
//
// Requirements:
// `group` is valid or `NULL`; `new_group` is writable.
enum cvk_status cvk_group_clone(const struct cvk_group *group,
                                uint64_t timeout_ms,
                                struct cvk_group **new_group);

// Makes a group of these ranks of `group`, in this order. All ranks of `group` call it with the same list.
// `new_group` becomes `NULL` on ranks that are not in the list. `name` is added to the name of the group,
// for errors; it may be `NULL`.
//
// Requirements:
// `group` is valid or `NULL`; `ranks` points to `count` ranks; `name` is `NULL` or ends with a byte 0;
// `new_group` is writable.
enum cvk_status cvk_group_subgroup(const struct cvk_group *group,
                                   const size_t *ranks,
                                   size_t count,
                                   const char *name,
                                   struct cvk_group **new_group);

// Partitions the group, like `MPI_Comm_split`: ranks with equal `color` form a group, ordered by `key`, then
// by rank. All ranks call it. A negative color makes no group: `new_group` becomes `NULL`.
//
// Requirements:
// `group` is valid or `NULL`; `new_group` is writable.
enum cvk_status cvk_group_split(const struct cvk_group *group,
                                int64_t color,
                                int64_t key,
                                struct cvk_group **new_group);

// Makes a group of the ranks that survived the failure of `group`. All survivors call it; it excludes ranks
// that do not call it within `within_ms` milliseconds of the first call. Like `MPI_Comm_shrink` of ULFM.
//
// Requirements:
// `group` is valid or `NULL`; `new_group` is writable.
enum cvk_status cvk_group_shrink(const struct cvk_group *group,
                                 uint64_t within_ms,
                                 struct cvk_group **new_group);

// Ends the group on all ranks: every pending or later call fails with `CVK_STATUS_ABORTED` and `reason`,
// which may be `NULL`. Any thread may call it, also while calls are in progress.
//
// Requirements:
// `group` is valid or `NULL`; `reason` is `NULL` or ends with a byte 0.
enum cvk_status cvk_group_abort(const struct cvk_group *group, const char *reason);

// Leaves the group now, after all operations of this rank are done, although handles exist. Later calls of
// this rank on the group fail with `CVK_STATUS_DESTROYED`.
//
// Requirements:
// `group` is valid or `NULL`.
enum cvk_status cvk_group_destroy(const struct cvk_group *group);

// Frees a handle; `NULL` is allowed. With the last handle this rank leaves the group, after the operations
// that it began are done.
//
// Requirements:
// `group` is `NULL` or valid, and not used from now on.
void cvk_group_free(struct cvk_group *group);

// Joins the job and connects to all its ranks. `options` may be `NULL`. The group of all ranks is written to
// `world`; free it with `cvk_group_free`.
//
// Requirements:
// `options` is `NULL` or points to options whose texts end with a byte 0; `world` is writable.
enum cvk_status cvk_init(const struct cvk_init_options *options, struct cvk_group **world);

// Allocates `bytes` zero bytes that all ranks of the host can access. All ranks of the group call it; each
// gets its own memory, of the size that it passes. An all-reduce of more than 16 KiB copies nothing if all
// ranks pass the whole memory of one call, or equal pages of it.
//
// If not all ranks share memory, all get private memory, as `cvk_memory_is_shared` tells. Free the handle
// with `cvk_memory_free`.
//
// Requirements:
// `group` is valid or `NULL`; `memory` is writable.
enum cvk_status cvk_alloc(const struct cvk_group *group, size_t bytes, struct cvk_memory **memory);

// Lets the other ranks of the host access memory that the program has already. The program has mapped `bytes`
// bytes of the file `descriptor`, from byte `offset` on, at `address`. Then an all-reduce of this memory copies
// nothing, as with memory of `cvk_alloc`. All ranks of the group call it, each with its own memory.
//
// `address` and `offset` are multiples of the page size. If a rank cannot share its memory, it stays private
// on all ranks, as `cvk_memory_is_shared` tells. `cvk_memory_free` ends the sharing; the program removes its
// mapping after that.
//
// After a failed operation on the memory, its pages are private and zero: the library replaces the mapping.
//
// Requirements:
// `group` is valid or `NULL`; `memory` is writable. The following holds until the handle is freed and all
// operations on the memory are done. The mapping stays: shared, readable and writable, with all of its last
// page. No process makes the file shorter.
enum cvk_status cvk_adopt(const struct cvk_group *group,
                          int descriptor,
                          uint64_t offset,
                          void *address,
                          size_t bytes,
                          struct cvk_memory **memory);

// Declares that the program uses only the first `bytes` bytes of memory of `cvk_alloc`: an all-reduce of
// exactly these copies nothing. If it fails, all bytes of their last page are unspecified. No operation may
// use the memory meanwhile. Other memory is left as it is.
//
// Requirements:
// `memory` is valid or `NULL`, and no other thread uses the handle.
enum cvk_status cvk_memory_limit_use(struct cvk_memory *memory, size_t bytes);

// Returns whether an all-reduce of the `bytes` bytes at `address` may copy nothing: they are memory of
// `cvk_alloc` or `cvk_adopt`, and begin and end with a page of it.
//
// Requirements:
// `group` is valid or `NULL`. `address` may be any.
bool cvk_is_shared_memory(const struct cvk_group *group, const void *address, size_t bytes);

// Returns the address of the memory; `NULL` for a handle that is `NULL`. It is aligned for every type.
//
// Requirements:
// `memory` is valid or `NULL`.
void *cvk_memory_address(const struct cvk_memory *memory);

// Returns whether the other ranks of the host can access the memory.
//
// Requirements:
// `memory` is valid or `NULL`.
bool cvk_memory_is_shared(const struct cvk_memory *memory);

// Frees memory of `cvk_alloc`, and ends the sharing of memory of `cvk_adopt`; `NULL` is allowed. No operation
// may use it any more.
//
// Requirements:
// `memory` is `NULL` or valid, and neither it nor its address is used from now on.
void cvk_memory_free(struct cvk_memory *memory);

// Waits until a message of rank `source`, or of any rank if it is `CVK_ANY_RANK`, with `tag` is there. It
// stays until it is received.
//
// Requirements:
// `group` is valid or `NULL`; `message` is writable.
enum cvk_status cvk_probe(const struct cvk_group *group,
                          int64_t source,
                          uint32_t tag,
                          struct cvk_message *message);

// As `cvk_probe`, but returns `CVK_STATUS_PENDING` at once if there is no such message.
//
// Requirements:
// `group` is valid or `NULL`; `message` is writable.
enum cvk_status cvk_try_probe(const struct cvk_group *group,
                              int64_t source,
                              uint32_t tag,
                              struct cvk_message *message);

// Returns what the last failed call of this thread reports, in one line of text for people. `NULL` if no
// call of this thread has failed. The text is valid until the next call that fails on this thread.
const char *cvk_error_message(void);

// Returns the error of the last failed call of this thread as a JSON object. `NULL` if no call of this
// thread has failed. The text is valid until the next call that fails on this thread.
//
// `code`, `message` and `ends_group` are always there. `rank` is the rank to inspect first. An error that
// ended the group has `group`, `call`, `seq`, `received_bytes`, `expected_bytes`, `reported_by` and
// `confirmed`. docs/reference/c.md lists the fields of each code.
const char *cvk_error_json(void);

// Returns whether the last failed call of this thread ended its group on all ranks.
bool cvk_error_ends_group(void);

// Starts a store server at an address of this host; `NULL` means every address. Port 0 means a free one.
// Free the handle with `cvk_store_free`.
//
// Requirements:
// `host` is `NULL` or ends with a byte 0; `store` is writable.
enum cvk_status cvk_store_serve(const char *host, uint16_t port, struct cvk_store **store);

// Returns the port of the server; 0 for a handle that is `NULL`.
//
// Requirements:
// `store` is valid or `NULL`.
uint16_t cvk_store_port(const struct cvk_store *store);

// Ends the server; `NULL` is allowed. Groups that formed at it go on, but cannot be shrunk.
//
// Requirements:
// `store` is `NULL` or valid, and not used from now on.
void cvk_store_free(struct cvk_store *store);

// Returns the table of functions, which is valid for ever; `NULL` if this library does not have that
// version. Pass `CVK_API_VERSION`.
const struct cvk_api_table *cvk_api(uint32_t version);

// Carries out `count` operations at once and waits for all of them. They progress concurrently, so two ranks
// may exchange messages by one call each. `messages` is `NULL`, or gets an entry for each operation; entries
// of operations that receive no message are not changed.
//
// If an argument is invalid, nothing is begun. Otherwise the first error is returned after all are done. The
// time limit is that of the first operation.
//
// Requirements:
// `group` is valid or `NULL`; `calls` points to `count` operations, whose pointers are valid as `cvk_call`
// says; `messages` is `NULL` or has room for `count` entries.
enum cvk_status cvk_run(const struct cvk_group *group,
                        const struct cvk_call *calls,
                        size_t count,
                        struct cvk_message *messages);

// Begins an operation and returns at once. It progresses whether or not a thread waits. Free the handle with
// `cvk_work_free`.
//
// Requirements:
// `group` is valid or `NULL`; `call` points to an operation, whose pointers are valid as `cvk_call` says;
// `work` is writable.
enum cvk_status cvk_start(const struct cvk_group *group, const struct cvk_call *call, struct cvk_work **work);

// Waits until the operation is done, at most `timeout_ms` milliseconds, or `CVK_FOREVER`. Then returns its
// result, also if it is asked again. Returns `CVK_STATUS_PENDING` if the operation is not done by then, or if the
// check of `cvk_set_interrupt_check` says that the program was interrupted.
// `message` is `NULL`, or gets the status of a received message.
//
// Requirements:
// `work` is valid or `NULL`; `message` is `NULL` or writable.
enum cvk_status cvk_work_wait(const struct cvk_work *work,
                              uint64_t timeout_ms,
                              struct cvk_message *message);

// Returns whether the operation is done, successfully or not. Then `cvk_work_wait` returns at once.
//
// Requirements:
// `work` is valid or `NULL`.
bool cvk_work_is_done(const struct cvk_work *work);

// Writes to `descriptor` a file descriptor that polls as readable once the operation is done, for event
// loops; -1 if it was done from the start. Do not read from it or close it. It is valid as long as the
// handle.
//
// Requirements:
// `work` is valid or `NULL`; `descriptor` is writable.
enum cvk_status cvk_work_descriptor(const struct cvk_work *work, int *descriptor);

// Registers a function that is called once when the operation is done, successfully or not; at once if it is
// done already. See `on_complete` of `cvk_call` for what the function may do.
//
// Requirements:
// `work` is valid or `NULL`; `function` may be called on any thread with `context`.
enum cvk_status cvk_work_on_complete(const struct cvk_work *work, cvk_callback function, void *context);

// Frees a handle; `NULL` is allowed. An operation in progress goes on: its memory must stay valid until
// `on_complete` is called, or until the group is freed.
//
// Requirements:
// `work` is `NULL` or valid, and not used from now on.
void cvk_work_free(struct cvk_work *work);

// Sets the function that says whether a thread that waits must stop, because the program was interrupted, as by
// Ctrl-C. The library calls it about ten times a second while a thread waits. It stays for the life of the
// process; a second call changes nothing.
//
// If it returns true, the group ends with `CVK_STATUS_ABORTED`. The error says for which rank this rank waited.
// `cvk_work_wait` ends no group: it returns `CVK_STATUS_PENDING`, and the operation goes on. `cvk_init` fails with
// `CVK_STATUS_BOOTSTRAP` or `CVK_STATUS_STORE`. A call of a store fails with `CVK_STATUS_STORE`.
//
// Requirements:
// `check` is valid for ever, from any thread. It may use no function of this library.
void cvk_set_interrupt_check(cvk_interrupt_check check);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* CONVOKE_H */
