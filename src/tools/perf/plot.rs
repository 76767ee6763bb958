//! Draws diagrams of bus bandwidth and latency over buffer size.

use std::ops::Range;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::error::PerfError;
use super::rows::Row;
use super::sizes;

const SIZE: (u32, u32) = (1000, 1000);
const FONT: &str = "sans-serif";
/// Hue step between lines: the golden ratio keeps any number of hues far apart.
const GOLDEN_RATIO: f64 = 0.618_034;

/// Function that returns the quantity of a row to draw over its size.
type Metric = fn(&Row) -> f64;
/// A named line of a diagram: its points (size, value).
type Line = (String, Vec<(f64, f64)>);

/// Draws `rows` into an SVG file, with one line for each collective, type, operation and algorithm. Rows
/// without data, such as rows of a barrier, are left out.
pub(crate) fn draw(rows: &[Row], path: &Path) -> Result<(), PerfError> {
    let failed = |why: String| PerfError::Plot { path: path.to_owned(), why };
    let text = svg(rows).map_err(failed)?;
    std::fs::write(path, text).map_err(|error| failed(error.to_string()))
}

fn svg(rows: &[Row]) -> Result<String, String> {
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        let to_message = |error: DrawingAreaErrorKind<_>| error.to_string();
        root.fill(&WHITE).map_err(to_message)?;
        let (upper, lower) = root.split_vertically(SIZE.1 / 2);
        panel(&upper, "bus bandwidth", "GB/s", &lines(rows, Row::bus_bandwidth)).map_err(to_message)?;
        panel(&lower, "latency, 50th percentile", "µs", &lines(rows, |row| row.timing.micros.p50))
            .map_err(to_message)?;
        root.present().map_err(to_message)?;
    }
    Ok(text)
}

/// Converts result rows to lines of a diagram. A property that all rows share is not part of the lines'
/// names.
fn lines(rows: &[Row], metric: Metric) -> Vec<Line> {
    let rows: Vec<&Row> = rows.iter().filter(|row| row.count > 0 && metric(row) > 0.0).collect();
    let differs = |part: fn(&Row) -> String| {
        // Rows without this property do not count.
        let mut parts = rows.iter().map(|row| part(row)).filter(|part| !part.is_empty());
        let first = parts.next();
        parts.any(|part| Some(part) != first)
    };
    let dtype = |row: &Row| row.case.dtype.to_string();
    let op = |row: &Row| row.case.op.map(|op| op.to_string()).unwrap_or_default();
    let algorithm = |row: &Row| row.algorithm.clone().unwrap_or_default();
    let mut parts = vec![dtype as fn(&Row) -> String, op, algorithm];
    parts.retain(|part| differs(*part));
    let name = |row: &Row| {
        let words = [row.case.collective.to_string()].into_iter().chain(parts.iter().map(|part| part(row)));
        words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
    };
    let mut lines = Vec::<Line>::new();
    for row in rows {
        let (name, point) = (name(row), (row.bytes() as f64, metric(row)));
        match lines.iter_mut().find(|(known, _)| *known == name) {
            Some((_, points)) => points.push(point),
            None => lines.push((name, vec![point])),
        }
    }
    lines
}

/// Draws one diagram with logarithmic axes.
fn panel<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    title: &str,
    unit: &str,
    lines: &[Line],
) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    let points = || lines.iter().flat_map(|(_, points)| points);
    let widths = axis_range(points().map(|point| point.0));
    let heights = axis_range(points().map(|point| point.1));
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{title}, {unit}"), (FONT, 20))
        .margin(16)
        .x_label_area_size(48)
        .y_label_area_size(72)
        .build_cartesian_2d(widths.log_scale().base(4.0), heights.log_scale())?;
    chart
        .configure_mesh()
        .x_desc("size")
        .y_desc(unit)
        .x_labels(14)
        .max_light_lines(1)
        .label_style((FONT, 14))
        .x_label_formatter(&|bytes| sizes::text(bytes.round() as usize))
        .y_label_formatter(&|height| format!("{height}"))
        .draw()?;
    for (number, (name, points)) in lines.iter().enumerate() {
        let color = HSLColor((number as f64 * GOLDEN_RATIO).fract(), 0.75, 0.4).to_rgba();
        let line = LineSeries::new(points.iter().copied(), color.stroke_width(2)).point_size(3);
        let drawn = chart.draw_series(line)?;
        drawn
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .label_font((FONT, 14))
        .draw()
}

/// Returns the range of an axis for positive numbers, with a margin. A logarithmic axis needs two different
/// ends.
fn axis_range(numbers: impl Iterator<Item = f64>) -> Range<f64> {
    let (least, most) =
        numbers.fold((f64::INFINITY, 0.0_f64), |(least, most), n| (least.min(n), most.max(n)));
    if most > 0.0 { least / 1.5..most * 1.5 } else { 1.0..10.0 }
}

#[cfg(test)]
mod tests {
    use super::super::collective::Collective;
    use super::super::rows::tests::row;
    use super::*;

    #[test]
    fn plot_lines_are_labelled_by_their_differences() {
        let mut rows: Vec<Row> =
            [64, 1024, 4096].map(|count| row(Collective::AllReduce, count, count as f64)).into();
        assert_eq!(lines(&rows, Row::bus_bandwidth).len(), 1);
        assert_eq!(lines(&rows, Row::bus_bandwidth)[0].0, "all_reduce");
        for algorithm in ["ring", "direct"] {
            rows.push(Row { algorithm: Some(algorithm.to_owned()), ..row(Collective::AllReduce, 64, 2.0) });
        }
        rows.extend([row(Collective::Barrier, 0, 2.0), row(Collective::Broadcast, 64, 2.0)]);
        let names: Vec<_> = lines(&rows, Row::bus_bandwidth).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["all_reduce", "all_reduce ring", "all_reduce direct", "broadcast"]);
    }

    #[test]
    fn plot_has_axes_units_and_a_legend() {
        let rows =
            [1, 1024, 1 << 20].map(|count| row(Collective::Broadcast, count, 5.0 + count as f64 / 100.0));
        let text = svg(&rows).unwrap();
        for word in
            ["bus bandwidth, GB/s", "latency, 50th percentile, µs", "size", "broadcast", "KiB", "<polyline"]
        {
            assert!(text.contains(word), "{word}:\n{text}");
        }
        assert!(svg(&[]).is_ok(), "nothing to draw is an empty drawing");
    }

    #[test]
    fn unwritable_plot_file_is_named() {
        let error = draw(&[], Path::new("/no/such/folder/x.svg")).unwrap_err().to_string();
        assert!(error.contains("/no/such/folder/x.svg"), "{error}");
    }
}
