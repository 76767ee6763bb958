//! The functions of NCCL, looked up once.

use std::ffi::{c_char, c_int, c_void};

use libloading::os::unix::Library as Handle;

use super::types::{Comm, Config, UniqueId};

macro_rules! functions {
    (
        required { $($field:ident = $name:literal ($($argument:ty),*) -> $result:ty;)* }
        optional { $($newer:ident = $newer_name:literal ($($newer_argument:ty),*) -> $newer_result:ty;)* }
    ) => {
        /// All functions that convoke calls; `None` for those that older versions lack.
        #[allow(missing_debug_implementations)] // addresses
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
            $(pub(super) $newer: Option<unsafe extern "C" fn($($newer_argument),*) -> $newer_result>,)*
        }

        impl Functions {
            /// Looks up the functions of a library. The error is the name of the first missing function.
            ///
            /// # Safety
            /// The library is NCCL, 2.18 or newer: functions of these names are those of its header.
            #[allow(unsafe_code)]
            pub(super) unsafe fn load(handle: &Handle) -> Result<Self, &'static str> {
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

type CommPtr = *mut Comm;
type StreamPtr = *mut c_void;
type ConstBuffer = *const c_void;
type MutBuffer = *mut c_void;

functions! {
    required {
    get_unique_id = "ncclGetUniqueId" (*mut UniqueId) -> c_int;
    get_error_string = "ncclGetErrorString" (c_int) -> *const c_char;
    get_last_error = "ncclGetLastError" (CommPtr) -> *const c_char;
    comm_init_rank_config = "ncclCommInitRankConfig" (*mut CommPtr, c_int, UniqueId, c_int, *mut Config) -> c_int;
    comm_get_async_error = "ncclCommGetAsyncError" (CommPtr, *mut c_int) -> c_int;
    comm_split = "ncclCommSplit" (CommPtr, c_int, c_int, *mut CommPtr, *mut Config) -> c_int;
    comm_finalize = "ncclCommFinalize" (CommPtr) -> c_int;
    comm_destroy = "ncclCommDestroy" (CommPtr) -> c_int;
    comm_abort = "ncclCommAbort" (CommPtr) -> c_int;
    red_op_create_pre_mul_sum = "ncclRedOpCreatePreMulSum" (*mut c_int, MutBuffer, c_int, c_int, CommPtr) -> c_int;
    red_op_destroy = "ncclRedOpDestroy" (c_int, CommPtr) -> c_int;
    all_reduce = "ncclAllReduce" (ConstBuffer, MutBuffer, usize, c_int, c_int, CommPtr, StreamPtr) -> c_int;
    all_gather = "ncclAllGather" (ConstBuffer, MutBuffer, usize, c_int, CommPtr, StreamPtr) -> c_int;
    broadcast = "ncclBroadcast" (ConstBuffer, MutBuffer, usize, c_int, c_int, CommPtr, StreamPtr) -> c_int;
    reduce = "ncclReduce" (ConstBuffer, MutBuffer, usize, c_int, c_int, c_int, CommPtr, StreamPtr) -> c_int;
    reduce_scatter = "ncclReduceScatter" (ConstBuffer, MutBuffer, usize, c_int, c_int, CommPtr, StreamPtr) -> c_int;
    send = "ncclSend" (ConstBuffer, usize, c_int, c_int, CommPtr, StreamPtr) -> c_int;
    recv = "ncclRecv" (MutBuffer, usize, c_int, c_int, CommPtr, StreamPtr) -> c_int;
    group_start = "ncclGroupStart" () -> c_int;
    group_end = "ncclGroupEnd" () -> c_int;
    }
    optional {
    comm_register = "ncclCommRegister" (CommPtr, MutBuffer, usize, *mut MutBuffer) -> c_int;
    comm_deregister = "ncclCommDeregister" (CommPtr, MutBuffer) -> c_int;
    }
}
