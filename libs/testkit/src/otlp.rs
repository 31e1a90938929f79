//! An OpenTelemetry collector that remembers what it gets, refuses it, or never answers.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use opentelemetry_proto::tonic::{
    collector::{
        logs::v1::{
            ExportLogsServiceRequest, ExportLogsServiceResponse,
            logs_service_server::{LogsService, LogsServiceServer},
        },
        metrics::v1::{
            ExportMetricsServiceRequest, ExportMetricsServiceResponse,
            metrics_service_server::{MetricsService, MetricsServiceServer},
        },
        trace::v1::{
            ExportTraceServiceRequest, ExportTraceServiceResponse,
            trace_service_server::{TraceService, TraceServiceServer},
        },
    },
    common::v1::{AnyValue, KeyValue, any_value},
    resource::v1::Resource,
};
use tokio::{net::TcpListener, sync::watch, time::timeout};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};
use tonic::{
    Request, Response, Status,
    transport::server::{Server, TcpIncoming},
};

/// A span as it came in. Ids are hex.
#[derive(Clone, Debug)]
pub struct Span {
    /// `service.name` of its process.
    pub service: String,
    /// What it is about.
    pub name: String,
    /// Which trace it belongs to.
    pub trace: String,
    /// Its own id.
    pub id: String,
    /// The id of what caused it; empty at the root.
    pub parent: String,
    /// `server`, `client`, `consumer` or `internal`.
    pub kind: &'static str,
    /// Nanoseconds since 1970.
    pub start: u64,
    /// Nanoseconds since 1970.
    pub end: u64,
    /// Whether its status is "error".
    pub failed: bool,
    /// Everything else that is known; lists are joined by commas.
    pub attributes: BTreeMap<String, String>,
}

/// A log record as it came in. Ids are hex, and empty outside of a trace.
#[derive(Clone, Debug)]
pub struct Record {
    /// `service.name` of its process.
    pub service: String,
    /// Its text.
    pub body: String,
    /// Which trace it belongs to.
    pub trace: String,
    /// The span that it was written in.
    pub span: String,
}

/// What the collector does with a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mood {
    /// Takes it.
    #[default]
    Takes,
    /// Answers UNAVAILABLE.
    Refuses,
    /// Never answers.
    Deaf,
}

/// Everything that came in.
#[derive(Clone, Debug, Default)]
pub struct Taken {
    /// Spans of all processes.
    pub spans: Vec<Span>,
    /// Log records of all processes.
    pub records: Vec<Record>,
    /// Units of all metrics, by name.
    pub metrics: BTreeMap<String, String>,
    /// Resource attributes of the last request.
    pub resource: BTreeMap<String, String>,
    /// Requests of any kind, those that were not taken too.
    pub requests: usize,
}

#[derive(Debug, Default)]
struct Desk {
    mood: Mutex<Mood>,
    taken: watch::Sender<Taken>,
}

/// The collector. Takes no more connections once it is dropped.
#[derive(Debug)]
pub struct Collector {
    address: SocketAddr,
    desk: Arc<Desk>,
    _stop: DropGuard,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Collector {
    /// Starts on a free port of 127.0.0.1.
    ///
    /// # Errors
    /// When no port can be bound.
    pub async fn start() -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let (desk, stop) = (Arc::new(Desk::default()), CancellationToken::new());
        let one = || Door(Arc::clone(&desk));
        let serving = Server::builder()
            .add_service(TraceServiceServer::new(one()).max_decoding_message_size(64 << 20))
            .add_service(MetricsServiceServer::new(one()))
            .add_service(LogsServiceServer::new(one()))
            .serve_with_incoming(TcpIncoming::from(listener));
        TaskTracker::new().spawn(stop.clone().run_until_cancelled_owned(serving));
        Ok(Self { address, desk, _stop: stop.drop_guard() })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// What a process is told.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Changes what is done with requests from now on.
    pub fn set_mood(&self, mood: Mood) {
        *lock(&self.desk.mood) = mood;
    }

    /// What came in so far.
    #[must_use]
    pub fn taken(&self) -> Taken {
        self.desk.taken.borrow().clone()
    }

    /// Waits until enough came in.
    ///
    /// # Panics
    /// When that takes longer than half a minute, with the names of what did come in.
    pub async fn until(&self, enough: impl FnMut(&Taken) -> bool) -> Taken {
        let mut taken = self.desk.taken.subscribe();
        let found = timeout(Duration::from_secs(30), taken.wait_for(enough)).await;
        if let Ok(Ok(taken)) = found {
            return taken.clone();
        }
        let Taken { spans, records, metrics, requests, .. } = self.taken();
        let spans: Vec<_> = spans.into_iter().map(|span| (span.service, span.name)).collect();
        let (records, metrics): (Vec<_>, Vec<_>) =
            (records.into_iter().map(|record| record.body).collect(), metrics.into_keys().collect());
        panic!("not enough came in after {requests} requests: {spans:#?} {records:#?} {metrics:#?}")
    }
}

/// The collector as one of its services.
#[derive(Debug)]
struct Door(Arc<Desk>);

impl Door {
    async fn take(&self, note: impl FnOnce(&mut Taken)) -> Result<(), Status> {
        let mood = *lock(&self.0.mood);
        self.0.taken.send_modify(|taken| taken.requests += 1);
        match mood {
            Mood::Takes => {
                self.0.taken.send_modify(note);
                Ok(())
            }
            Mood::Refuses => Err(Status::unavailable("not today")),
            Mood::Deaf => std::future::pending().await,
        }
    }
}

fn text(value: Option<&AnyValue>) -> String {
    match value.and_then(|value| value.value.as_ref()) {
        Some(any_value::Value::StringValue(text)) => text.clone(),
        Some(any_value::Value::BoolValue(value)) => value.to_string(),
        Some(any_value::Value::IntValue(value)) => value.to_string(),
        Some(any_value::Value::DoubleValue(value)) => value.to_string(),
        Some(any_value::Value::ArrayValue(list)) => {
            list.values.iter().map(|value| text(Some(value))).collect::<Vec<_>>().join(",")
        }
        _ => String::new(),
    }
}

fn attributes(pairs: &[KeyValue]) -> BTreeMap<String, String> {
    pairs.iter().map(|pair| (pair.key.clone(), text(pair.value.as_ref()))).collect()
}

fn note_resource(taken: &mut Taken, resource: Option<&Resource>) -> String {
    taken.resource = resource.map(|resource| attributes(&resource.attributes)).unwrap_or_default();
    taken.resource.get("service.name").cloned().unwrap_or_default()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tonic::async_trait]
impl TraceService for Door {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.take(|taken| {
            for group in request.into_inner().resource_spans {
                let service = note_resource(taken, group.resource.as_ref());
                for span in group.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                    taken.spans.push(Span {
                        service: service.clone(),
                        trace: hex(&span.trace_id),
                        id: hex(&span.span_id),
                        parent: hex(&span.parent_span_id),
                        kind: match span.kind {
                            2 => "server",
                            3 => "client",
                            5 => "consumer",
                            _ => "internal",
                        },
                        start: span.start_time_unix_nano,
                        end: span.end_time_unix_nano,
                        failed: span.status.is_some_and(|status| status.code == 2),
                        attributes: attributes(&span.attributes),
                        name: span.name,
                    });
                }
            }
        })
        .await?;
        Ok(Response::new(Default::default()))
    }
}

#[tonic::async_trait]
impl MetricsService for Door {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        self.take(|taken| {
            for group in request.into_inner().resource_metrics {
                note_resource(taken, group.resource.as_ref());
                let metrics = group.scope_metrics.into_iter().flat_map(|scope| scope.metrics);
                taken.metrics.extend(metrics.map(|metric| (metric.name, metric.unit)));
            }
        })
        .await?;
        Ok(Response::new(Default::default()))
    }
}

#[tonic::async_trait]
impl LogsService for Door {
    async fn export(
        &self,
        request: Request<ExportLogsServiceRequest>,
    ) -> Result<Response<ExportLogsServiceResponse>, Status> {
        self.take(|taken| {
            for group in request.into_inner().resource_logs {
                let service = note_resource(taken, group.resource.as_ref());
                let records = group.scope_logs.into_iter().flat_map(|scope| scope.log_records);
                taken.records.extend(records.map(|record| Record {
                    service: service.clone(),
                    body: text(record.body.as_ref()),
                    trace: hex(&record.trace_id),
                    span: hex(&record.span_id),
                }));
            }
        })
        .await?;
        Ok(Response::new(Default::default()))
    }
}
