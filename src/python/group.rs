//! Groups and their operations.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use convoke::call::Call;
use convoke::work::{Message, Work as RawWork};
use convoke_comm::{CommError, GroupOptions, Session};
use convoke_store::{MemoryStore, PrefixStore, TcpStore};
use pyo3::prelude::*;

use crate::error::{exception, exception_of_json};
use crate::memory::Memory;
use crate::store::seconds;

/// Joins a world; see `convoke_dist.init`.
#[pyfunction]
#[pyo3(signature = (url, store, rank, world_size, name, timeout, init_timeout))]
#[allow(clippy::too_many_arguments)] // the arguments of the Python function
pub(crate) fn init(
    py: Python<'_>,
    url: Option<&str>,
    store: Option<&str>,
    rank: Option<usize>,
    world_size: Option<usize>,
    name: Option<&str>,
    timeout: Option<f64>,
    init_timeout: Option<f64>,
) -> PyResult<Group> {
    let (timeout, init_timeout) = (timeout.map(seconds).transpose()?, init_timeout.map(seconds).transpose()?);
    let change = |mut options: GroupOptions| {
        if let Some(name) = name {
            options = options.name(name);
        }
        if let Some(timeout) = timeout {
            options = options.timeout(timeout);
        }
        if let Some(timeout) = init_timeout {
            options = options.init_timeout(timeout);
        }
        options
    };
    let join = || {
        let session = match (url, store, rank.zip(world_size)) {
            (None, Some(address), Some((rank, size))) => {
                let store: Arc<dyn convoke_store::Store> = match size {
                    1 => Arc::new(MemoryStore::new()),
                    _ => {
                        let within = init_timeout.unwrap_or(Duration::from_secs(300));
                        Arc::new(TcpStore::connect(address, std::time::Instant::now() + within)?)
                    }
                };
                let store = PrefixStore::new(name.unwrap_or("world"), store);
                Session::from_store(Arc::new(store), rank, size)?
            }
            (Some(_), Some(_), _) => return Err(invalid("pass url or store, not both")),
            (None, Some(_), None) => return Err(invalid("store needs rank and world_size")),
            (None, None, None) => Session::join()?,
            (Some(url), None, None) => Session::from_url(url)?,
            (url, None, Some((rank, size))) => Session::from_url_as(url.unwrap_or("env://"), rank, size)?,
        };
        let world = session.with_options(change).world()?;
        let local = (world.local_rank(), world.local_world_size());
        Ok(Group::new(world.group(), local, world.restart_count()))
    };
    py.detach(join).map_err(|error| exception(&error))
}

fn invalid(what: &str) -> CommError {
    CommError::InvalidArgument(what.to_owned())
}

/// A process group.
#[pyclass(frozen, module = "convoke_dist._core")]
pub(crate) struct Group {
    /// `None` after `close`.
    group: Mutex<Option<convoke_comm::Group>>,
    local: (usize, usize),
    #[pyo3(get)]
    restart_count: u32,
}

/// The arrays of operations whose works were dropped before they were done. A function of this module that has the
/// interpreter's lock drops them.
static KEPT: Mutex<Vec<(Arc<RawWork>, Py<PyAny>)>> = Mutex::new(Vec::new());
/// The works that the program has, for the end of the process.
static STARTED: Mutex<Vec<Weak<RawWork>>> = Mutex::new(Vec::new());

fn drop_kept() {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    kept.retain(|(work, _)| !work.is_done());
}

/// Notes a work, and removes the notes of those that are gone.
fn note_started(work: &Arc<RawWork>) {
    let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
    if started.len() == started.capacity() {
        started.retain(|work| work.strong_count() > 0);
    }
    started.push(Arc::downgrade(work));
}

/// Detaches the works of operations that are not done, and leaks their arrays. The process ends, and the works would
/// keep this rank in its groups.
#[pyfunction]
pub(crate) fn detach_works(py: Python<'_>) {
    let started = std::mem::take(&mut *STARTED.lock().unwrap_or_else(PoisonError::into_inner));
    let kept = std::mem::take(&mut *KEPT.lock().unwrap_or_else(PoisonError::into_inner));
    py.detach(|| started.iter().filter_map(Weak::upgrade).for_each(|work| work.detach()));
    kept.into_iter().for_each(|(_, arrays)| std::mem::forget(arrays));
}

impl Group {
    fn new(group: convoke_comm::Group, local: (usize, usize), restart_count: u32) -> Self {
        Self { group: Mutex::new(Some(group)), local, restart_count }
    }

    fn of(group: convoke_comm::Group) -> Self {
        let local = group.local_rank_and_size();
        Self::new(group, local, 0)
    }

    fn get(&self) -> PyResult<convoke_comm::Group> {
        let group = self.group.lock().unwrap_or_else(PoisonError::into_inner);
        group.clone().ok_or_else(|| exception(&invalid("this group was closed")))
    }

    /// Runs a function that may wait, without the interpreter's lock.
    fn detached<R: Send>(
        &self,
        py: Python<'_>,
        function: impl FnOnce(&convoke_comm::Group) -> Result<R, CommError> + Send,
    ) -> PyResult<R> {
        let group = self.get()?;
        // The handle is dropped without the lock too: it may be the last one.
        py.detach(move || function(&group)).map_err(|error| exception(&error))
    }
}

/// A call, as the Python code of the package describes it.
#[derive(FromPyObject)]
struct CallArguments {
    kind: u32,
    dtype: u32,
    op: u32,
    peer: i64,
    tag: u32,
    send: usize,
    send_count: usize,
    recv: usize,
    recv_count: usize,
    send_counts: Option<Vec<usize>>,
    recv_counts: Option<Vec<usize>>,
    factor: Option<Vec<u8>>,
    timeout: Option<f64>,
}

impl CallArguments {
    /// Passes the call of the C interface to a function.
    fn with_call<R>(&self, function: impl FnOnce(&Call) -> R) -> PyResult<R> {
        let counts =
            |counts: &Option<Vec<usize>>| counts.as_ref().map_or(ptr::null(), |counts| counts.as_ptr());
        let mut factor = [0_u8; 16];
        if let Some(bytes) = &self.factor {
            let length = bytes.len().min(factor.len());
            factor[..length].copy_from_slice(&bytes[..length]);
        }
        let timeout_ms = match self.timeout {
            Some(timeout) => u64::try_from(seconds(timeout)?.as_millis()).unwrap_or(u64::MAX).max(1),
            None => 0,
        };
        let call = Call {
            dtype: self.dtype,
            reduce_op: self.op,
            tag: self.tag,
            peer: self.peer,
            send: ptr::with_exposed_provenance(self.send),
            recv: ptr::with_exposed_provenance_mut::<c_void>(self.recv),
            send_count: self.send_count,
            recv_count: self.recv_count,
            send_counts: counts(&self.send_counts),
            recv_counts: counts(&self.recv_counts),
            factor: if self.factor.is_some() { factor.as_ptr().cast() } else { ptr::null() },
            timeout_ms,
            ..Call::of_kind_number(self.kind)
        };
        Ok(function(&call))
    }
}

/// The source, tag and length of a received message.
type MessageTuple = (usize, u32, usize);

fn tuple(message: Message) -> MessageTuple {
    (message.source, message.tag, message.count)
}

#[pymethods]
impl Group {
    #[getter]
    fn rank(&self) -> PyResult<usize> {
        Ok(self.get()?.rank())
    }

    #[getter]
    fn size(&self) -> PyResult<usize> {
        Ok(self.get()?.size())
    }

    #[getter]
    fn local_rank(&self) -> usize {
        self.local.0
    }

    #[getter]
    fn local_size(&self) -> usize {
        self.local.1
    }

    #[getter]
    fn name(&self) -> PyResult<String> {
        Ok(self.get()?.name().to_owned())
    }

    #[getter]
    fn timeout(&self) -> PyResult<f64> {
        Ok(self.get()?.timeout().as_secs_f64())
    }

    #[getter]
    fn global_ranks(&self) -> PyResult<Vec<usize>> {
        Ok(self.get()?.global_ranks().to_vec())
    }

    #[getter]
    fn hosts(&self) -> PyResult<Vec<Vec<usize>>> {
        Ok(self.get()?.hosts().to_vec())
    }

    /// Carries out an operation; returns the status of a received message.
    fn run(&self, py: Python<'_>, call: CallArguments) -> PyResult<Option<MessageTuple>> {
        drop_kept();
        let group = self.get()?;
        let done = call.with_call(|call| {
            // The pointers stay valid: the arguments and the program's arrays live until the call returns.
            let call = Sendable(call);
            py.detach(move || {
                let call = call;
                // SAFETY: the package describes arrays by their own addresses and lengths, and keeps them.
                unsafe { RawWork::run(&group, call.0) }
            })
        })?;
        done.map(|message| message.map(tuple)).map_err(|error| exception(&error))
    }

    /// Begins an operation. `arrays` is kept until it is done.
    fn start(&self, call: CallArguments, arrays: Py<PyAny>) -> PyResult<Work> {
        drop_kept();
        let group = self.get()?;
        // SAFETY: the package describes arrays by their own addresses and lengths. `Work` keeps them.
        let work = call.with_call(|call| unsafe { RawWork::begin(&group, call) })?;
        let work = work.map_err(|error| exception(&error))?;
        let work = Arc::new(work);
        note_started(&work);
        Ok(Work { work, arrays: Mutex::new(Some(arrays)) })
    }

    fn monitored_barrier(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = seconds(timeout)?;
        self.detached(py, |group| group.monitored_barrier(timeout))
    }

    #[pyo3(signature = (source, tag))]
    fn probe(&self, py: Python<'_>, source: Option<usize>, tag: u32) -> PyResult<MessageTuple> {
        self.detached(py, |group| group.probe(source, tag).map(|status| tuple(status.into())))
    }

    #[pyo3(signature = (source, tag))]
    fn try_probe(&self, py: Python<'_>, source: Option<usize>, tag: u32) -> PyResult<Option<MessageTuple>> {
        self.detached(py, |group| Ok(group.try_probe(source, tag)?.map(|status| tuple(status.into()))))
    }

    fn alloc(&self, py: Python<'_>, bytes: usize) -> PyResult<Memory> {
        self.detached(py, |group| {
            let buffer = group.alloc::<u64>(bytes.div_ceil(size_of::<u64>()))?;
            Ok(Memory::new(buffer, bytes))
        })
    }

    #[pyo3(signature = (ranks, name))]
    fn subgroup(&self, py: Python<'_>, ranks: Vec<usize>, name: Option<&str>) -> PyResult<Option<Self>> {
        self.detached(py, |group| {
            let parent = name.map(|name| group.with_subgroup_name(name));
            Ok(parent.as_ref().unwrap_or(group).subgroup(&ranks)?.map(Self::of))
        })
    }

    #[pyo3(signature = (color, key))]
    fn split(&self, py: Python<'_>, color: Option<u32>, key: i64) -> PyResult<Option<Self>> {
        self.detached(py, |group| Ok(group.split(color, key)?.map(Self::of)))
    }

    fn shrink(&self, py: Python<'_>, within: f64) -> PyResult<Self> {
        let within = seconds(within)?;
        self.detached(py, |group| Ok(Self::of(group.shrink(within)?)))
    }

    fn with_timeout(&self, timeout: f64) -> PyResult<Self> {
        let group = self.get()?.with_timeout(seconds(timeout)?);
        Ok(Self::new(group, self.local, self.restart_count))
    }

    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        self.detached(py, |group| {
            group.abort(reason);
            Ok(())
        })
    }

    fn close(&self, py: Python<'_>) {
        let group = self.group.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The last handle waits for operations in progress.
        py.detach(move || drop(group));
        drop_kept();
    }
}

/// A reference that another thread may use while its owner waits.
struct Sendable<'a>(&'a Call);

// SAFETY: `detach` runs the function on this thread.
unsafe impl Send for Sendable<'_> {}

/// An operation in progress, and its arrays.
#[pyclass(frozen, module = "convoke_dist._core")]
pub(crate) struct Work {
    work: Arc<RawWork>,
    arrays: Mutex<Option<Py<PyAny>>>,
}

#[pymethods]
impl Work {
    /// Waits for `timeout` seconds, or until the operation is done. Returns whether it is done, and the status of a
    /// received message.
    #[pyo3(signature = (timeout))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<(bool, Option<MessageTuple>)> {
        let timeout = timeout.map(seconds).transpose()?;
        loop {
            match py.detach(|| self.work.wait(timeout)) {
                // Only a signal ends a wait without a time limit. Its handler may let the program go on.
                None if timeout.is_none() => py.check_signals()?,
                None => return py.check_signals().map(|()| (false, None)),
                Some(Ok(message)) => return Ok((true, message.map(tuple))),
                Some(Err(json)) => return Err(exception_of_json(json)),
            }
        }
    }

    fn is_done(&self) -> bool {
        self.work.is_done()
    }

    fn fileno(&self) -> PyResult<i32> {
        self.work.descriptor().map_err(|error| exception(&error))
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let arrays = self.arrays.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(arrays) = arrays.filter(|_| !self.work.is_done()) {
            let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
            kept.push((Arc::clone(&self.work), arrays));
        }
    }
}
