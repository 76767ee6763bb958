//! The description of an operation: its kind, its buffers and its arguments.

#![allow(unsafe_code)]

use std::ffi::c_void;

use convoke_comm::raw::{self, Buffer, Operation, Reduction};
use convoke_comm::{CommError, Dtype, ReduceOp};

use crate::pointers::{invalid, list};

/// The type of an element.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataType {
    /// `int8_t`
    I8 = 0,
    /// `uint8_t`
    U8 = 1,
    /// `int16_t`
    I16 = 2,
    /// `uint16_t`
    U16 = 3,
    /// `int32_t`
    I32 = 4,
    /// `uint32_t`
    U32 = 5,
    /// `int64_t`
    I64 = 6,
    /// `uint64_t`
    U64 = 7,
    /// `float`
    F32 = 8,
    /// `double`
    F64 = 9,
    /// IEEE half precision, 2 bytes
    F16 = 10,
    /// The upper 16 bits of a `float`
    Bf16 = 11,
    /// `bool`: one byte, 0 or 1
    Bool = 12,
    /// Two `float`: real and imaginary part
    ComplexF32 = 13,
    /// Two `double`: real and imaginary part
    ComplexF64 = 14,
}

/// The reduction that combines the ranks' elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    /// Sum; integers wrap. On bools: or.
    Sum = 0,
    /// Minimum; NaN if an operand is NaN. Not of complex numbers.
    Min = 1,
    /// Maximum; NaN if an operand is NaN. Not of complex numbers.
    Max = 2,
    /// Product; integers wrap.
    Product = 3,
    /// Sum divided by the number of ranks; of floating-point and complex types.
    Avg = 4,
    /// Bitwise AND, of integers and bools.
    Band = 5,
    /// Bitwise OR, of integers and bools.
    Bor = 6,
    /// Bitwise exclusive OR, of integers and bools.
    Bxor = 7,
    /// Sum, where each rank first multiplies its elements by its own `factor`.
    PremulSum = 8,
    /// The function `reduce` of the call.
    Custom = 9,
}

/// The kind of an operation. Where both buffers hold elements of this rank, a `send` of `NULL` means in
/// place: the operation reads `recv` and writes its result there.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Waits for all ranks.
    Barrier = 0,
    /// Reduces `send`, or `recv` in place, into `recv` on all ranks.
    AllReduce = 1,
    /// Copies `recv` of rank `peer` to `recv` of all ranks.
    Broadcast = 2,
    /// Reduces `send` into `recv` of rank `peer`, or `recv` in place; then `recv` of other ranks is scratch.
    Reduce = 3,
    /// Concatenates `send` of all ranks in `recv`. In place: this rank's block of `recv`.
    AllGather = 4,
    /// Reduces `send`, and gives each rank its block in `recv`. In place: the result is this rank's block of
    /// `recv`.
    ReduceScatter = 5,
    /// Concatenates `send` of all ranks in `recv` of rank `peer`.
    Gather = 6,
    /// Gives each rank its block of `send` of rank `peer`.
    Scatter = 7,
    /// Gives each rank its block of `send` of each rank. In place: of `recv`.
    AllToAll = 8,
    /// As `CVK_KIND_ALL_GATHER`, with a block of `recv_counts[rank]` elements of each rank.
    AllGatherV = 9,
    /// As `CVK_KIND_REDUCE_SCATTER`, with a block of `send_counts[rank]` elements for each rank.
    ReduceScatterV = 10,
    /// As `CVK_KIND_GATHER`, with a block of `recv_counts[rank]` elements of each rank. The root passes the
    /// counts.
    GatherV = 11,
    /// As `CVK_KIND_SCATTER`, with a block of `send_counts[rank]` elements for each rank. The root passes the
    /// counts.
    ScatterV = 12,
    /// As `CVK_KIND_ALL_TO_ALL`, with `send_counts[rank]` elements for, and `recv_counts[rank]` of each rank.
    AllToAllV = 13,
    /// Replaces `recv` by the reduction of the ranks up to this one.
    Scan = 14,
    /// Replaces `recv` by the reduction of the ranks before this one. It is unchanged on rank 0.
    ExclusiveScan = 15,
    /// Sends `send` to rank `peer` with `tag`.
    Send = 16,
    /// Receives a message of rank `peer`, or of any rank if it is `CVK_ANY_RANK`, with `tag` into `recv`.
    Recv = 17,
}

impl Kind {
    const ALL: [Self; 18] = [
        Self::Barrier,
        Self::AllReduce,
        Self::Broadcast,
        Self::Reduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::AllGatherV,
        Self::ReduceScatterV,
        Self::GatherV,
        Self::ScatterV,
        Self::AllToAllV,
        Self::Scan,
        Self::ExclusiveScan,
        Self::Send,
        Self::Recv,
    ];
}

/// As `peer` of `CVK_KIND_RECV`: any rank.
pub const ANY_RANK: i64 = -1;

/// A function that combines elements of two ranks: `into[i] = combine(into[i], from[i])` for `count`
/// elements. It runs on any thread, must not call this library, and should be commutative and associative.
pub type ReduceFunction =
    Option<unsafe extern "C" fn(context: *mut c_void, into: *mut c_void, from: *const c_void, count: usize)>;

/// A function that the library calls with the pointer that the program gave.
pub type Callback = Option<unsafe extern "C" fn(context: *mut c_void)>;

/// An operation. Set all bytes to 0, then `size` and `kind`, then what the kind needs.
///
/// The memory of the buffers must stay valid and unused until the operation is done: until `cvk_run` returns,
/// `cvk_work_wait` returns its result, or `on_complete` is called. The lists of counts are copied.
#[repr(C)]
#[derive(Debug, Clone)]
pub struct Call {
    /// `sizeof(cvk_call)`.
    pub size: usize,
    /// A `cvk_kind`.
    pub kind: u32,
    /// The `cvk_type` of both buffers.
    pub dtype: u32,
    /// The `cvk_op` of a reduction.
    pub reduce_op: u32,
    /// The tag of a message.
    pub tag: u32,
    /// The root of a collective; the destination or source of a message.
    pub peer: i64,
    /// The elements that the operation reads, or `NULL`.
    pub send: *const c_void,
    /// The elements that the operation writes, or `NULL`.
    pub recv: *mut c_void,
    /// Number of elements at `send`.
    pub send_count: usize,
    /// Number of elements at `recv`.
    pub recv_count: usize,
    /// Number of elements of each rank's block at `send`, for kinds that end with V.
    pub send_counts: *const usize,
    /// Number of elements of each rank's block at `recv`, for kinds that end with V.
    pub recv_counts: *const usize,
    /// The factor of `CVK_OP_PREMUL_SUM`: an element, or a `float` for the 16-bit floating-point types.
    pub factor: *const c_void,
    /// The function of `CVK_OP_CUSTOM`.
    pub reduce: ReduceFunction,
    /// The first argument of `reduce`.
    pub reduce_context: *mut c_void,
    /// Time limit in milliseconds; 0 means the group's. An operation that exceeds it ends the group.
    pub timeout_ms: u64,
    /// Called once when an operation of `cvk_start` is done, successfully or not, and uses the memory no
    /// more. It is not called if `cvk_start` fails. It runs on the thread that finds the operation done, and
    /// may begin operations, but must not wait for any.
    pub on_complete: Callback,
    /// The argument of `on_complete`.
    pub on_complete_context: *mut c_void,
}

/// A pointer of the program that its callbacks get, on any thread.
#[derive(Clone, Copy)]
pub(crate) struct Context(*mut c_void);

// SAFETY: the library only passes the pointer on. The program promises that its callbacks may run on any
// thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Call {
    /// Returns the callback of a call with its argument.
    pub(crate) fn callback(&self) -> Option<impl FnOnce() + Send + 'static + use<>> {
        let (function, context) = (self.on_complete?, Context(self.on_complete_context));
        Some(callback(function, context))
    }

    /// Returns the operation for a group of `size` ranks.
    ///
    /// # Safety
    /// The pointers of the call are valid as [`Call`] says.
    pub(crate) unsafe fn operation(&self, size: usize) -> Result<Operation, CommError> {
        if self.size != size_of::<Self>() {
            return Err(invalid(format!(
                "cvk_call.size is {}, and this library's is {}: set it to sizeof(cvk_call), and compile with \
                 the convoke.h of this library",
                self.size,
                size_of::<Self>()
            )));
        }
        let kind = number(&Kind::ALL, self.kind, "kind")?;
        let mut operation = Operation::new(self.kind_of_operation(kind, size)?);
        if kind == Kind::Barrier {
            return Ok(operation);
        }
        let dtype = number(&Dtype::ALL, self.dtype, "dtype")?;
        let range = |at: usize, count: usize| at..at.saturating_add(count.saturating_mul(dtype.size_bytes()));
        let (send, recv) =
            (range(self.send.addr(), self.send_count), range(self.recv.addr(), self.recv_count));
        let has_both = !self.send.is_null() && !self.recv.is_null();
        if has_both && send.start.max(recv.start) < send.end.min(recv.end) {
            let advice =
                "pass no send buffer for an operation in place, where there is one, or copy the elements";
            return Err(invalid(format!("send and recv overlap: {advice}")));
        }
        // SAFETY: the caller promises it. The library only reads at `send`.
        unsafe {
            if !self.send.is_null() {
                operation = operation.send(Buffer::new(self.send.cast_mut().cast(), self.send_count, dtype));
            }
            if !self.recv.is_null() {
                operation = operation.recv(Buffer::new(self.recv.cast(), self.recv_count, dtype));
            }
        }
        // An empty buffer may have no address.
        if self.send.is_null() && self.recv.is_null() {
            // SAFETY: the counts are checked to be 0: there are no elements.
            let empty = || unsafe { Buffer::new(std::ptr::null_mut(), 0, dtype) };
            if self.send_count > 0 || self.recv_count > 0 {
                return Err(invalid("send and recv are NULL, and their counts are not 0".to_owned()));
            }
            operation = operation.send(empty()).recv(empty());
        }
        Ok(operation)
    }

    fn kind_of_operation(&self, kind: Kind, size: usize) -> Result<raw::Call, CommError> {
        let in_place = self.send.is_null() && !self.recv.is_null();
        // SAFETY: the caller of `operation` promises it.
        let counts = |at, what| unsafe { list(at, size, what) }.map(<[usize]>::to_vec);
        let (send_counts, recv_counts) =
            (|| counts(self.send_counts, "send_counts"), || counts(self.recv_counts, "recv_counts"));
        let root_counts = |root: usize, at: *const usize, what| {
            // Only the root knows the counts; other ranks pass their own block.
            if at.is_null() { Ok(vec![0; size]) } else { counts(at, what) }.map(|lens| (lens, root))
        };
        Ok(match kind {
            Kind::Barrier => raw::Call::Barrier,
            Kind::AllReduce if in_place => raw::Call::AllReduce { op: self.reduction()? },
            Kind::AllReduce => raw::Call::AllReduceInto { op: self.reduction()? },
            Kind::Broadcast => raw::Call::Broadcast { root: self.peer()? },
            Kind::Reduce if in_place => raw::Call::Reduce { op: self.reduction()?, root: self.peer()? },
            Kind::Reduce => raw::Call::ReduceInto { op: self.reduction()?, root: self.peer()? },
            Kind::AllGather if in_place => raw::Call::AllGatherInPlace,
            Kind::AllGather => raw::Call::AllGather,
            Kind::ReduceScatter if in_place => raw::Call::ReduceScatterInPlace { op: self.reduction()? },
            Kind::ReduceScatter => raw::Call::ReduceScatter { op: self.reduction()? },
            Kind::Gather => raw::Call::Gather { root: self.peer()? },
            Kind::Scatter => raw::Call::Scatter { root: self.peer()? },
            Kind::AllToAll if in_place => raw::Call::AllToAllInPlace,
            Kind::AllToAll => raw::Call::AllToAll,
            Kind::AllGatherV => raw::Call::AllGatherV { lens: recv_counts()? },
            Kind::ReduceScatterV => raw::Call::ReduceScatterV { lens: send_counts()?, op: self.reduction()? },
            Kind::GatherV => {
                let (lens, root) = root_counts(self.peer()?, self.recv_counts, "recv_counts")?;
                raw::Call::GatherV { lens, root }
            }
            Kind::ScatterV => {
                let (lens, root) = root_counts(self.peer()?, self.send_counts, "send_counts")?;
                raw::Call::ScatterV { lens, root }
            }
            Kind::AllToAllV => raw::Call::AllToAllV { send_lens: send_counts()?, recv_lens: recv_counts()? },
            Kind::Scan => raw::Call::Scan { op: self.reduction()? },
            Kind::ExclusiveScan => raw::Call::ExclusiveScan { op: self.reduction()? },
            Kind::Send => raw::Call::Send { to: self.peer()?, tag: self.tag },
            Kind::Recv if self.peer == ANY_RANK => raw::Call::Recv { from: None, tag: self.tag },
            Kind::Recv => raw::Call::Recv { from: Some(self.peer()?), tag: self.tag },
        })
    }

    fn peer(&self) -> Result<usize, CommError> {
        usize::try_from(self.peer).map_err(|_| invalid(format!("peer {} is no rank", self.peer)))
    }

    fn reduction(&self) -> Result<Reduction, CommError> {
        match number(&ReduceOp::ALL, self.reduce_op, "reduce_op")? {
            ReduceOp::PremulSum => {
                let dtype = number(&Dtype::ALL, self.dtype, "dtype")?;
                if self.factor.is_null() {
                    return Err(invalid("factor of CVK_OP_PREMUL_SUM is NULL".to_owned()));
                }
                let bytes = if matches!(dtype, Dtype::F16 | Dtype::Bf16) { 4 } else { dtype.size_bytes() };
                let mut factor = [0; 16];
                // SAFETY: the caller of `operation` promises that the factor is there.
                unsafe { std::ptr::copy_nonoverlapping(self.factor.cast(), factor.as_mut_ptr(), bytes) };
                Reduction::premul_sum(dtype, factor)
            }
            ReduceOp::Custom => {
                let dtype = number(&Dtype::ALL, self.dtype, "dtype")?;
                let function =
                    self.reduce.ok_or_else(|| invalid("reduce of CVK_OP_CUSTOM is NULL".to_owned()))?;
                let context = Context(self.reduce_context);
                Ok(Reduction::new(move |into, from| {
                    combine(function, context, into, from, dtype.size_bytes())
                }))
            }
            op => Ok(op.into()),
        }
    }
}

/// Returns a closure that calls a function of the program.
pub(crate) fn callback(
    function: unsafe extern "C" fn(*mut c_void),
    context: Context,
) -> impl FnOnce() + Send + 'static {
    // SAFETY: the program promises that its callback may be called with its pointer, on any thread.
    move || unsafe { function(context.get()) }
}

impl Context {
    pub(crate) fn new(context: *mut c_void) -> Self {
        Self(context)
    }

    /// A method, so that closures capture the whole value and not the pointer in it.
    fn get(self) -> *mut c_void {
        self.0
    }
}

/// Calls a reduction function of the program. Elements that are not aligned for a 16-byte type are copied to
/// aligned memory, since C requires alignment.
fn combine(
    function: unsafe extern "C" fn(*mut c_void, *mut c_void, *const c_void, usize),
    context: Context,
    into: &mut [u8],
    from: &[u8],
    size: usize,
) {
    let is_aligned = |at: *const u8| at.addr().is_multiple_of(size.min(align_of::<u64>()));
    let count = into.len() / size;
    if is_aligned(into.as_ptr()) && is_aligned(from.as_ptr()) {
        // SAFETY: both have `count` elements; the program promises that its function combines them.
        return unsafe {
            function(context.get(), into.as_mut_ptr().cast(), from.as_ptr().cast(), count);
        };
    }
    const CHUNK: usize = 4096;
    let (mut a, mut b) = ([0_u128; CHUNK / 16], [0_u128; CHUNK / 16]);
    for (into, from) in into.chunks_mut(CHUNK).zip(from.chunks(CHUNK)) {
        // SAFETY: a chunk has at most `CHUNK` bytes, as the arrays have; `CHUNK` is a multiple of each size.
        unsafe {
            std::ptr::copy_nonoverlapping(into.as_ptr(), a.as_mut_ptr().cast(), into.len());
            std::ptr::copy_nonoverlapping(from.as_ptr(), b.as_mut_ptr().cast(), from.len());
            function(context.get(), a.as_mut_ptr().cast(), b.as_ptr().cast(), into.len() / size);
            std::ptr::copy_nonoverlapping(a.as_ptr().cast(), into.as_mut_ptr(), into.len());
        }
    }
}

/// Returns the entry of a list by its number from C.
fn number<T: Copy>(all: &[T], number: u32, what: &str) -> Result<T, CommError> {
    let found = usize::try_from(number).ok().and_then(|number| all.get(number));
    found
        .copied()
        .ok_or_else(|| invalid(format!("{what} {number} is unknown: there are 0 to {}", all.len() - 1)))
}
