//! Records a timeline of the ranks for a trace viewer.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use convoke_comm::Group;
use serde::{Deserialize, Serialize};

use crate::error::TrainError;

/// Maximum number of spans that one rank keeps; later spans are discarded.
const SPANS: usize = 1 << 17;
/// Longest title of a row, in bytes.
const TITLE_BYTES: usize = 200;
/// Number of the row for the program's computation in the trace viewer; later rows belong to gradient
/// buckets.
const COMPUTATION: u32 = 0;

/// Time spans of this rank; one file holds the spans of all ranks.
///
/// The file has the Trace Event Format, which <https://ui.perfetto.dev> and `chrome://tracing` display. Each
/// rank is a process with one row for computation and one for each bucket of gradients. The span of a bucket
/// lasts from the start of sending it until its average arrives, including the wait for earlier buckets.
/// Differences between the clocks of the hosts are not corrected. A rank keeps 131,072 spans.
///
/// ```
/// # fn main() -> Result<(), convoke_train::TrainError> {
/// use convoke_train::{Ddp, DdpOptions, Trace};
///
/// let (world, trace) = (convoke_comm::init()?, Trace::default());
/// let mut ddp = Ddp::<f32>::with_options(&world, [("weights", 10)], DdpOptions::default().trace(&trace))?;
/// let span = trace.span("forward");
/// // ...
/// span.end();
/// # let path = std::env::temp_dir().join(format!("convoke-doc-{}.json", std::process::id()));
/// trace.write(&world, &path)?;
/// # std::fs::remove_file(path).unwrap();
/// # Ok(())
/// # }
/// ```
///
/// A clone records into the same trace.
#[derive(Debug, Clone)]
pub struct Trace {
    recording: Arc<Mutex<Recording>>,
    /// One point in time, read from the monotonic clock and from the wall clock, to convert between them.
    begin: (Instant, SystemTime),
    /// Maximum number of spans.
    capacity: usize,
}

/// The spans and row titles that one rank has recorded.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Recording {
    spans: Vec<RecordedSpan>,
    /// Titles of the rows of buckets, by row number.
    titles: BTreeMap<u32, String>,
}

/// A span as it is recorded.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct RecordedSpan {
    name: String,
    row: u32,
    /// Time since 1970.
    start: Duration,
    time: Duration,
    /// The size of the bucket, if the span is of a bucket.
    bytes: Option<u64>,
}

impl Default for Trace {
    /// An empty trace.
    fn default() -> Self {
        Self { recording: Arc::default(), begin: (Instant::now(), SystemTime::now()), capacity: SPANS }
    }
}

impl Trace {
    /// Returns a trace that records nothing, for programs whose tracing is optional.
    #[must_use]
    pub fn off() -> Self {
        Self { capacity: 0, ..Self::default() }
    }

    /// Begins a span of computation, which ends when the returned value is dropped.
    pub fn span(&self, name: impl Into<String>) -> Span {
        self.begin(name.into(), COMPUTATION, None)
    }

    /// Begins the span of bucket `index`, which is being sent and has `bytes` bytes. `names` are the names of
    /// the parameters in it.
    pub(crate) fn bucket<'a>(
        &self,
        index: usize,
        bytes: usize,
        names: impl Iterator<Item = &'a str>,
    ) -> Span {
        let row = COMPUTATION + 1 + index as u32;
        self.recording().titles.entry(row).or_insert_with(|| title(index, names));
        self.begin(format!("bucket {index}"), row, Some(bytes as u64))
    }

    fn begin(&self, name: String, row: u32, bytes: Option<u64>) -> Span {
        let (begin, (instant, time)) = (Instant::now(), self.begin);
        let since_1970 = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let start = since_1970 + begin.saturating_duration_since(instant);
        let recorded = RecordedSpan { name, row, start, time: Duration::ZERO, bytes };
        Span { trace: self.clone(), recorded, begin }
    }

    fn recording(&self) -> MutexGuard<'_, Recording> {
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the spans that all ranks of the group have recorded so far. All ranks call this function; rank
    /// 0 writes the file.
    ///
    /// # Errors
    /// [`TrainError::Trace`] on rank 0 if the file cannot be written. Otherwise the errors of
    /// [`Group::gather_object`].
    pub fn write(&self, group: &Group, path: &Path) -> Result<(), TrainError> {
        let recorded = self.recording().clone();
        let Some(ranks) = group.gather_object(&recorded, 0)? else { return Ok(()) };
        let write = || {
            let mut file = BufWriter::new(File::create(path)?);
            serde_json::to_writer(&mut file, &TraceFile::of(&ranks)).map_err(io::Error::from)?;
            file.flush()
        };
        write().map_err(|source| TrainError::Trace { path: path.to_owned(), source })
    }
}

/// Title of a bucket's row: its number, and as many of its parameters' names as fit.
fn title<'a>(index: usize, names: impl Iterator<Item = &'a str>) -> String {
    let mut title = format!("bucket {index}:");
    for name in names {
        if title.len() + name.len() > TITLE_BYTES {
            title.push_str(" ...");
            break;
        }
        title.extend([" ", name]);
    }
    title
}

/// A time span that is being measured; it ends when it is dropped.
#[derive(Debug)]
#[must_use = "it ends when it is dropped"]
pub struct Span {
    trace: Trace,
    recorded: RecordedSpan,
    begin: Instant,
}

impl Span {
    /// Ends the span.
    pub fn end(self) {}
}

impl Drop for Span {
    fn drop(&mut self) {
        self.recorded.time = self.begin.elapsed();
        let mut recording = self.trace.recording();
        if recording.spans.len() < self.trace.capacity {
            recording.spans.push(std::mem::take(&mut self.recorded));
        }
    }
}

/// The used part of the Trace Event Format: an object with a list of events.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct TraceFile<'a> {
    display_time_unit: &'static str,
    trace_events: Vec<Event<'a>>,
}

/// An event: a span (`X`), or the name of a process or row (`M`).
#[derive(Debug, Default, Serialize)]
struct Event<'a> {
    name: &'a str,
    ph: &'static str,
    /// Start time in microseconds.
    ts: f64,
    dur: f64,
    /// The rank.
    pid: usize,
    /// The row.
    tid: u32,
    args: BTreeMap<&'a str, String>,
}

impl<'a> TraceFile<'a> {
    fn of(ranks: &'a [Recording]) -> Self {
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        let spans = ranks.iter().flat_map(|recording| &recording.spans);
        let begin = spans.map(|recorded| recorded.start).min().unwrap_or_default();
        let mut trace_events = Vec::new();
        for (rank, Recording { spans, titles }) in ranks.iter().enumerate() {
            let mut named = |name: &'static str, tid: u32, title: String| {
                let args = BTreeMap::from([("name", title)]);
                trace_events.push(Event { name, ph: "M", pid: rank, tid, args, ..Event::default() });
            };
            named("process_name", COMPUTATION, format!("rank {rank}"));
            named("thread_name", COMPUTATION, "computation".to_owned());
            titles.iter().for_each(|(&row, title)| named("thread_name", row, title.clone()));
            trace_events.extend(spans.iter().map(|recorded| Event {
                name: &recorded.name,
                ph: "X",
                ts: micros(recorded.start - begin),
                dur: micros(recorded.time),
                pid: rank,
                tid: recorded.row,
                args: recorded.bytes.map(|bytes| ("bytes", bytes.to_string())).into_iter().collect(),
            }));
        }
        Self { display_time_unit: "ms", trace_events }
    }
}
