//! Expected results of each collective, and the check of actual results. Pure.

use std::ops::Range;

use super::collective::{Collective, Shape};
use super::values::{PERIOD, TestPattern, Value};

/// The first element that differs from the expected result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WrongElement {
    /// Index of the element in the buffer.
    pub(crate) index: usize,
    pub(crate) got: String,
    pub(crate) expected: String,
}

/// Elements of a result that come from one set of ranks.
#[derive(Debug, PartialEq, Eq)]
struct Part {
    /// Position of the elements in the result.
    range: Range<usize>,
    /// Index of the first element in the buffers of the source ranks.
    from: usize,
    source: Source,
}

#[derive(Debug, PartialEq, Eq)]
enum Source {
    /// The elements that one rank contributes.
    Rank(usize),
    /// The reduction of the elements that these ranks contribute.
    ReductionOf(Range<usize>),
}

/// Fills the buffers before the checked call. `a` gets this rank's contribution, `b` gets numbers that no
/// rank contributes.
pub(crate) fn fill<T: Value>(pattern: &TestPattern, shape: &Shape, a: &mut [T], b: &mut [T]) {
    for (buffer, rank) in [(a, shape.rank), (b, shape.ranks)] {
        let period: Vec<T> = (0..PERIOD).map(|index| pattern.element(rank, index)).collect();
        for chunk in buffer.chunks_mut(PERIOD) {
            chunk.copy_from_slice(&period[..chunk.len()]);
        }
    }
}

/// Compares the buffers with the expected result after the checked call.
pub(crate) fn check<T: Value>(
    pattern: &TestPattern,
    shape: &Shape,
    root: usize,
    (a, b): (&[T], &[T]),
) -> Result<(), WrongElement> {
    let result = if shape.buffer_lens().1 == 0 && !shape.collective.has_blocks() { a } else { b };
    parts(shape, root).iter().try_for_each(|part| check_part(pattern, part, result))
}

fn check_part<T: Value>(pattern: &TestPattern, part: &Part, result: &[T]) -> Result<(), WrongElement> {
    let expected = |index: usize| match &part.source {
        Source::Rank(rank) => pattern.element(*rank, index),
        Source::ReductionOf(ranks) => pattern.reduced(ranks.clone(), index),
    };
    let Range { start, end } = part.range;
    let period: Vec<T> = (part.from..part.from + PERIOD.min(end - start)).map(expected).collect();
    for (number, chunk) in result[start..end].chunks(PERIOD).enumerate() {
        if let Some(at) = chunk.iter().zip(&period).position(|(got, expected)| got != expected) {
            let (got, expected) = (format!("{:?}", chunk[at]), format!("{:?}", period[at]));
            return Err(WrongElement { index: start + number * PERIOD + at, got, expected });
        }
    }
    Ok(())
}

/// The parts of a call's result; empty on a rank that gets no result.
fn parts(shape: &Shape, root: usize) -> Vec<Part> {
    let &Shape { collective, rank, ranks, count, .. } = shape;
    let whole = |source| vec![Part { range: 0..count, from: 0, source }];
    let own = |source| {
        vec![Part { range: 0..shape.own_block_len(), from: shape.block_ranges(0)[rank].start, source }]
    };
    let of_each = |from: &dyn Fn(usize) -> usize| {
        let blocks = shape.block_ranges(rank).into_iter().enumerate();
        blocks
            .map(|(source, range)| Part { range, from: from(source), source: Source::Rank(source) })
            .collect()
    };
    match collective.equal_form() {
        Collective::AllReduce => whole(Source::ReductionOf(0..ranks)),
        Collective::Reduce if rank == root => whole(Source::ReductionOf(0..ranks)),
        Collective::Broadcast => whole(Source::Rank(root)),
        Collective::Scan => whole(Source::ReductionOf(0..rank + 1)),
        Collective::ExclusiveScan if rank == 0 => whole(Source::Rank(0)),
        Collective::ExclusiveScan => whole(Source::ReductionOf(0..rank)),
        Collective::AllGather => of_each(&|_| 0),
        Collective::Gather if rank == root => of_each(&|_| 0),
        Collective::ReduceScatter => own(Source::ReductionOf(0..ranks)),
        Collective::Scatter => own(Source::Rank(root)),
        Collective::AllToAll => of_each(&|source| shape.block_ranges(source)[rank].start),
        Collective::SendRecv if rank < collective.participants(ranks) => whole(Source::Rank(rank ^ 1)),
        // A rank that is not the root, or has no peer, and a barrier.
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;
    use convoke_comm::{Dtype, ReduceOp};

    use super::*;

    /// Computes the result of `rank` from the buffers of all ranks, by the definition of the collective.
    fn model(collective: Collective, op: ReduceOp, root: usize, all: &[Vec<i64>], rank: usize) -> Vec<i64> {
        let shape = |rank| Shape::new(collective, all[0].len(), rank, all.len());
        let fold = |ranks: Range<usize>, index: usize| {
            let numbers = all[ranks].iter().map(|buffer| buffer[index]);
            if op == ReduceOp::Max { numbers.max().unwrap() } else { numbers.sum() }
        };
        let reduced =
            |ranks: Range<usize>| (0..all[0].len()).map(|i| fold(ranks.clone(), i)).collect::<Vec<_>>();
        let block = |from: usize, of: usize| all[from][shape(from).block_ranges(from)[of].clone()].to_vec();
        let gathered = || {
            let of = |from: usize| all[from][..shape(from).own_block_len()].to_vec();
            (0..all.len()).flat_map(of).collect::<Vec<_>>()
        };
        match collective {
            Collective::AllReduce | Collective::Reduce => reduced(0..all.len()),
            Collective::Broadcast => all[root].clone(),
            Collective::Scan => reduced(0..rank + 1),
            Collective::ExclusiveScan => {
                if rank == 0 {
                    all[0].clone()
                } else {
                    reduced(0..rank)
                }
            }
            Collective::AllGather | Collective::AllGatherV | Collective::Gather | Collective::GatherV => {
                gathered()
            }
            Collective::ReduceScatter | Collective::ReduceScatterV => {
                reduced(0..all.len())[shape(0).block_ranges(0)[rank].clone()].to_vec()
            }
            Collective::Scatter | Collective::ScatterV => block(root, rank),
            Collective::AllToAll | Collective::AllToAllV => {
                (0..all.len()).flat_map(|from| block(from, rank)).collect()
            }
            Collective::SendRecv => all[rank ^ 1].clone(),
            Collective::Barrier => Vec::new(),
        }
    }

    /// Tests each collective on 4 ranks, with blocks longer than the period of the numbers. `then` gets the
    /// correct result, may change one element, and returns its index.
    fn each(then: impl Fn(Collective, usize, &mut [i64]) -> Option<usize>) {
        for (collective, op) in
            Collective::value_variants().iter().flat_map(|&c| [(c, ReduceOp::Sum), (c, ReduceOp::Max)])
        {
            let (ranks, root) = (4, 2);
            let count = collective.count(8 * 2400, 8, ranks);
            let pattern = TestPattern::new(collective.reduces().then_some(op), Dtype::I64, ranks);
            let all: Vec<Vec<i64>> = (0..ranks)
                .map(|rank| (0..count).map(|index| pattern.element(rank, index)).collect())
                .collect();
            for rank in 0..ranks {
                let shape = Shape::new(collective, count, rank, ranks);
                let mut result = model(collective, op, root, &all, rank);
                let spoiled = if result.is_empty() { None } else { then(collective, rank, &mut result) };
                let outcome = check(&pattern, &shape, root, (&result, &result));
                let gets_none = collective.has_root()
                    && collective != Collective::Broadcast
                    && rank != root
                    && !matches!(collective, Collective::Scatter | Collective::ScatterV);
                let expected = if gets_none { None } else { spoiled };
                assert_eq!(
                    outcome.err().map(|wrong| wrong.index),
                    expected,
                    "{collective} {op} on rank {rank}"
                );
            }
        }
    }

    #[test]
    fn correct_results_pass() {
        each(|_, _, _| None);
    }

    #[test]
    fn one_wrong_element_is_detected_at_any_index() {
        for at in [0.0, 0.4, 0.9999] {
            each(|_, _, result| {
                let index = (result.len() as f64 * at) as usize;
                result[index] += 1;
                Some(index)
            });
        }
    }

    #[test]
    fn unwritten_result_is_detected_and_reported() {
        let (shape, pattern) =
            (Shape::new(Collective::AllGather, 12, 1, 3), TestPattern::new(None, Dtype::Bool, 3));
        let (mut a, mut b) = (vec![false; 4], vec![false; 12]);
        fill(&pattern, &shape, &mut a, &mut b);
        let wrong = check(&pattern, &shape, 0, (&a, &b)).unwrap_err();
        assert_ne!(wrong.got, wrong.expected);
        assert_eq!(wrong.got, format!("{:?}", b[wrong.index]));
    }
}
