//! Checks and times the calls of one collective.

use std::time::Instant;

use convoke_comm::{CommError, Dtype, Group, ReduceOp};

use super::buffers::BenchBuffers;
use super::call::Call;
use super::collective::{Collective, Shape};
use super::error::PerfError;
use super::memory;
use super::stats::{self, Percentiles, RunLength};
use super::values::TestPattern;

/// Settings for making and timing calls.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) length: RunLength,
    /// Number of warm-up calls; by default as many as are needed to estimate the time of a call.
    pub(crate) warmup: Option<usize>,
    /// The root of all calls; `None` rotates the root.
    pub(crate) root: Option<usize>,
    pub(crate) checked: bool,
    /// Write the send buffers again before each call.
    pub(crate) rewrite: bool,
    pub(crate) nonblocking: bool,
    /// Allocate memory that the ranks of a host share.
    pub(crate) alloc: bool,
    pub(crate) in_flight: usize,
}

/// One measured combination: a collective, an element type and an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BenchCase {
    pub(crate) collective: Collective,
    pub(crate) dtype: Dtype,
    /// `None` if the collective does not reduce.
    pub(crate) op: Option<ReduceOp>,
}

/// Times of one call in microseconds. Each is the mean over the ranks that take part.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Timing {
    pub(crate) iterations: usize,
    pub(crate) micros: Percentiles,
}

/// A case to measure, with buffers for its largest size.
pub(crate) struct Bench<'a, P> {
    settings: &'a Settings,
    case: BenchCase,
    buffers: P,
}

impl<'a, P: BenchBuffers> Bench<'a, P> {
    pub(crate) fn new(settings: &'a Settings, case: BenchCase, buffers: P) -> Self {
        Self { settings, case, buffers }
    }

    /// Checks and times calls of `count` elements.
    pub(crate) fn measure(&mut self, group: &Group, count: usize) -> Result<Timing, PerfError> {
        let shape = Shape::new(self.case.collective, count, group.rank(), group.size());
        let call = Call::new(shape, self.case.op);
        if self.settings.checked {
            self.check(group, &call, self.settings.root.unwrap_or(0))?;
            if self.settings.root.is_none() && self.case.collective.has_root() && group.size() > 1 {
                self.check(group, &call, group.size() - 1)?;
            }
        }
        self.time(group, &call)
    }

    fn check(&mut self, group: &Group, call: &Call<P::Element>, root: usize) -> Result<(), PerfError> {
        let BenchCase { collective, dtype, op } = self.case;
        let pattern = TestPattern::new(op, dtype, group.size());
        self.buffers.fill(&pattern, call)?;
        self.buffers.run(group, call, root)?;
        self.buffers.synchronize()?;
        self.buffers.check(&pattern, call, root)?.map_err(|wrong| {
            let bytes = call.shape.count.saturating_mul(dtype.size_bytes());
            let (op, rank) = (op.map(|op| op.to_string()), group.rank());
            PerfError::WrongResult { collective, bytes, dtype, op, root, rank, wrong }
        })
    }

    fn time(&mut self, group: &Group, call: &Call<P::Element>) -> Result<Timing, PerfError> {
        let (ranks, in_flight) = (group.size(), self.settings.in_flight as f64);
        let root = |iteration: usize| self.settings.root.unwrap_or(iteration % ranks);
        self.buffers.clear(call)?;
        group.barrier()?;
        let estimate = self.warm_up(group, call)?;
        let roots = if self.settings.root.is_some() { 1 } else { ranks };
        let calls_per_sample = self.buffers.calls_per_sample(estimate);
        let iterations = self.settings.length.iterations(estimate * calls_per_sample as f64, roots);
        let mut micros = memory::try_filled_vec(iterations, 0.0_f64, "the times of so many iterations")?;
        group.barrier()?;
        let mut before = Instant::now();
        for (iteration, micros) in micros.iter_mut().enumerate() {
            if self.settings.rewrite {
                self.buffers.rewrite(call);
                before = Instant::now();
            }
            for number in 0..calls_per_sample {
                self.buffers.run(group, call, root(iteration + number))?;
            }
            self.buffers.synchronize()?;
            let now = Instant::now();
            *micros = now.duration_since(before).as_secs_f64() * 1e6;
            before = now;
        }
        // `send_recv` sends two messages. Ranks that do not take part measure no time.
        let messages = if self.case.collective == Collective::SendRecv { 2.0 } else { 1.0 };
        let participants = self.case.collective.participants(ranks);
        if group.rank() >= participants {
            micros.fill(0.0);
        }
        group.all_reduce(&mut micros, ReduceOp::Sum)?;
        let each = participants as f64 * messages * in_flight * calls_per_sample as f64;
        micros.iter_mut().for_each(|micros| *micros /= each);
        Ok(Timing { iterations: iterations * calls_per_sample, micros: stats::percentiles(&mut micros) })
    }

    /// Makes calls until caches and connections are warm. Returns the estimated microseconds of one
    /// iteration; all ranks get equal values.
    fn warm_up(&mut self, group: &Group, call: &Call<P::Element>) -> Result<f64, CommError> {
        let ranks = group.size();
        let rounds = if self.settings.warmup.is_some() { 1 } else { 3 };
        let (mut calls, mut estimate) = (self.settings.warmup.unwrap_or(ranks), f64::INFINITY);
        let enough = match self.settings.length {
            RunLength::Iterations(_) if calls == 0 => return Ok(0.0),
            RunLength::Iterations(_) => 5_000.0,
            RunLength::ForTime { micros, .. } => micros / 5.0,
        };
        // At least one call is needed to estimate the time of a call.
        calls = calls.max(1);
        for _ in 0..rounds {
            let start = Instant::now();
            for iteration in 0..calls {
                if self.settings.rewrite {
                    self.buffers.rewrite(call);
                }
                self.buffers.run(group, call, self.settings.root.unwrap_or(iteration % ranks))?;
            }
            self.buffers.synchronize()?;
            let mut worst = [start.elapsed().as_secs_f64() * 1e6 / calls as f64];
            group.all_reduce(&mut worst, ReduceOp::Max)?;
            estimate = estimate.min(worst[0]);
            if estimate * calls as f64 > enough {
                break;
            }
            calls = if estimate < 200.0 { 12 * ranks } else { ranks };
        }
        Ok(estimate)
    }
}
