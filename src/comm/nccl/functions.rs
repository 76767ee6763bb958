//! The functions of NCCL, looked up once.

use std::ffi::{c_char, c_int, c_void};

use libloading::os::unix::Library as Handle;

use super::types::{Comm, Config, UniqueId};

macro_rules! functions {
    (
        needed { $($field:ident = $name:literal ($($argument:ty),*) -> $result:ty;)* }
        newer { $($newer:ident = $newer_name:literal ($($newer_argument:ty),*) -> $newer_result:ty;)* }
    ) => {
        /// All functions that are called; `None` for those that older versions lack.
        #[allow(missing_debug_implementations)] // addresses
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
            $(pub(super) $newer: Option<unsafe extern "C" fn($($newer_argument),*) -> $newer_result>,)*
        }

        impl Functions {
            /// Looks up the functions of a library. The error is the name of the first that is missing.
            ///
            /// # Safety
            /// The library is NCCL, 2.18 or newer: functions of these names are those of its header.
            #[allow(unsafe_code)]
            pub(super) unsafe fn of(handle: &Handle) -> Result<Self, &'static str> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the caller promises it.
                        let found = unsafe { handle.get(concat!($name, "\0").as_bytes()) };
                        *found.map_err(|_| $name)?
                    },)*
                    $($newer: {
                        // SAFETY: the caller promises it.
                        let found = unsafe { handle.get(concat!($newer_name, "\0").as_bytes()) };
                        found.ok().map(|symbol| *symbol)
                    },)*
                })
            }
        }
    };
}

type Communicator = *mut Comm;
type Stream = *mut c_void;
type Read = *const c_void;
type Written = *mut c_void;

functions! {
    needed {
    get_unique_id = "ncclGetUniqueId" (*mut UniqueId) -> c_int;
    get_error_string = "ncclGetErrorString" (c_int) -> *const c_char;
    get_last_error = "ncclGetLastError" (Communicator) -> *const c_char;
    comm_init_rank_config = "ncclCommInitRankConfig" (*mut Communicator, c_int, UniqueId, c_int, *mut Config) -> c_int;
    comm_get_async_error = "ncclCommGetAsyncError" (Communicator, *mut c_int) -> c_int;
    comm_split = "ncclCommSplit" (Communicator, c_int, c_int, *mut Communicator, *mut Config) -> c_int;
    comm_finalize = "ncclCommFinalize" (Communicator) -> c_int;
    comm_destroy = "ncclCommDestroy" (Communicator) -> c_int;
    comm_abort = "ncclCommAbort" (Communicator) -> c_int;
    red_op_create_pre_mul_sum = "ncclRedOpCreatePreMulSum" (*mut c_int, Written, c_int, c_int, Communicator) -> c_int;
    red_op_destroy = "ncclRedOpDestroy" (c_int, Communicator) -> c_int;
    all_reduce = "ncclAllReduce" (Read, Written, usize, c_int, c_int, Communicator, Stream) -> c_int;
    all_gather = "ncclAllGather" (Read, Written, usize, c_int, Communicator, Stream) -> c_int;
    broadcast = "ncclBroadcast" (Read, Written, usize, c_int, c_int, Communicator, Stream) -> c_int;
    reduce = "ncclReduce" (Read, Written, usize, c_int, c_int, c_int, Communicator, Stream) -> c_int;
    reduce_scatter = "ncclReduceScatter" (Read, Written, usize, c_int, c_int, Communicator, Stream) -> c_int;
    send = "ncclSend" (Read, usize, c_int, c_int, Communicator, Stream) -> c_int;
    recv = "ncclRecv" (Written, usize, c_int, c_int, Communicator, Stream) -> c_int;
    group_start = "ncclGroupStart" () -> c_int;
    group_end = "ncclGroupEnd" () -> c_int;
    }
    newer {
    comm_register = "ncclCommRegister" (Communicator, Written, usize, *mut Written) -> c_int;
    comm_deregister = "ncclCommDeregister" (Communicator, Written) -> c_int;
    }
}
